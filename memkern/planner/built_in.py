"""Models that `plan` knows by name, as configurations of transformers."""

from __future__ import annotations

from typing import Any


def _gpt2(layers: int, heads: int, width: int) -> tuple[str, str, dict[str, Any]]:
    return "GPT2Config", "GPT2LMHeadModel", {"n_layer": layers, "n_head": heads, "n_embd": width}


def _encoder(family: str, layers: int, heads: int, width: int) -> tuple[str, str, dict[str, Any]]:
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": width,
        "intermediate_size": 4 * width,
    }
    if family == "Roberta":
        sizes |= {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    task = "Image" if family == "ViT" else "Sequence"
    return f"{family}Config", f"{family}For{task}Classification", sizes


def _llama(
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    inner: int,
    vocabulary: int,
    positions: int,
    tied: bool = False,
) -> tuple[str, str, dict[str, Any]]:
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
    return "LlamaConfig", "LlamaForCausalLM", sizes


def _qwen3(layers: int, heads: int, width: int, inner: int) -> tuple[str, str, dict[str, Any]]:
    sizes = _llama(layers, heads, 8, width, inner, 151936, 40960)[2]
    return "Qwen3Config", "Qwen3ForCausalLM", sizes | {"head_dim": 128}


MODELS = {
    "distilgpt2": _gpt2(6, 12, 768),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "bert-base": _encoder("Bert", 12, 12, 768),
    "bert-large": _encoder("Bert", 24, 16, 1024),
    "roberta-base": _encoder("Roberta", 12, 12, 768),
    "roberta-large": _encoder("Roberta", 24, 16, 1024),
    "tinyllama-1.1b": _llama(22, 32, 4, 2048, 5632, 32000, 2048),
    "llama-3.2-1b": _llama(16, 32, 8, 2048, 8192, 128256, 131072, tied=True),
    "llama-3.2-3b": _llama(28, 24, 8, 3072, 8192, 128256, 131072, tied=True),
    "llama-2-7b": _llama(32, 32, 32, 4096, 11008, 32000, 4096),
    "llama-2-13b": _llama(40, 40, 40, 5120, 13824, 32000, 4096),
    "llama-3.1-8b": _llama(32, 32, 8, 4096, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(80, 64, 8, 8192, 28672, 128256, 131072),
    "qwen3-8b": _qwen3(36, 32, 4096, 12288),
    "qwen3-14b": _qwen3(40, 40, 5120, 17408),
    "qwen3-32b": _qwen3(64, 64, 5120, 25600),
    "vit-base": _encoder("ViT", 12, 12, 768),
    "vit-large": _encoder("ViT", 24, 16, 1024),
    "vit-huge": _encoder("ViT", 32, 16, 1280),
}
"""transformers' configuration and model, and the sizes in which it differs from the configuration's defaults."""


def built_in(name: str) -> Any:
    """transformers' configuration of a built-in name."""
    import transformers

    config, architecture, sizes = MODELS[name]
    return getattr(transformers, config)(**sizes, architectures=[architecture])
