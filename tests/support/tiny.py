"""Tiny models of transformers' types: their default configurations with few layers and small sizes."""

from __future__ import annotations

from typing import Any

import torch

from memkern.planner.inputs import class_of_type
from memkern.planner.models import ConfiguredModel, resolve

TOKENS, LAYERS, WIDTH, VOCABULARY = 16, 3, 32, 128
MAX_PARAMETERS = 8_000_000  # of a model that counts as tiny
# Sizes, and the fields of configurations that get them.
SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (LAYERS, (
        "num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "n_layer",
        "n_layers", "num_encoder_layers", "speech_encoder_layers", "encoder_num_hidden_layers", "depth",
        "adapter_layers", "transformer_layers",
    )),
    (WIDTH, (
        "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "word_embed_proj_dim", "projection_dim",
        "embedding_size", "audio_embed_dim", "output_dim", "conv_dim", "encoder_hidden_size", "decoder_hidden_size",
        "fusion_hidden_size", "image_size",
    )),
    (2 * WIDTH, (
        "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "hidden_dim",
        "moe_intermediate_size", "dim_feedforward", "speech_encoder_intermediate_size",
    )),
    (2, (
        "num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads",
        "num_key_value_heads", "speech_encoder_attention_heads", "attention_heads",
    )),
    (WIDTH // 2, ("head_dim", "d_kv", "attention_head_size")),
    (VOCABULARY, ("vocab_size", "decoder_vocab_size")),
    (8, ("patch_size",)),
    (2 * TOKENS, ("max_source_positions",)),
)  # fmt: skip
MISSING: dict[str, dict[str, Any]] = {
    "wav2vec2-bert": {"vocab_size": VOCABULARY, "feature_projection_input_dim": 80},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
}
"""Fields without which the default configurations of these types make no model."""


def shrunk(config: Any) -> Any:
    """The configuration, and those inside it, with SIZES and a LayerDrop of 0.5."""
    for size, names in SIZES:
        for name in names:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, size)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrunk(value)
        elif "layerdrop" in name:
            setattr(config, name, 0.5)
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(config, name, 1)
    return config


def drops_layers(config: Any) -> bool:
    """Whether a configuration, or one inside of it, has LayerDrop."""
    return any("layerdrop" in name or (hasattr(x, "to_dict") and drops_layers(x)) for name, x in vars(config).items())


def types() -> list[str]:
    """The types of models that transformers has for text, images or sound."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return [kind for kind in sorted(CONFIG_MAPPING_NAMES) if class_of_type(kind) is not None]


def source(kind: str) -> ConfiguredModel:
    """The type's tiny model. Raises whatever transformers raises where these sizes do not fit together."""
    from transformers import CONFIG_MAPPING

    model: Any = resolve(shrunk(CONFIG_MAPPING[kind](**MISSING.get(kind, {}))), TOKENS, None, None, None)
    with torch.device("meta"):
        count = sum(p.numel() for p in model.build(torch.float32).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{kind} has {count} parameters")
    return model
