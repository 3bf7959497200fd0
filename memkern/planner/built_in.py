"""Models that ``plan`` and ``train --from-config`` know by name, without network."""

from __future__ import annotations

from typing import Any

_LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilgpt2": ("gpt2", {"n_layer": 6}),
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_head": 16, "n_embd": 1024}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_head": 20, "n_embd": 1280}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
    "bert-base": ("bert", {}),
    "vit-base": ("vit", {}),
    "llama-3.1-8b": ("llama", _LLAMA_8B),
    "qwen3-8b": ("qwen3", _QWEN3_8B),
}
"""transformers' model type, and the values that differ from the type's default configuration."""


def built_in(name: str) -> Any:
    """transformers' configuration of a built-in name."""
    from transformers import CONFIG_MAPPING

    from .inputs import class_of_type

    kind, sizes = MODELS[name]
    return CONFIG_MAPPING[kind](**sizes, architectures=[class_of_type(kind)])
