"""Models of transformers, timm and diffusers with random weights, and a batch for each: nothing is downloaded.

Models of transformers and diffusers have small sizes, models of timm their own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import diffusion_nets, timm_nets

VOCABULARY = 1000
WIDTH, HEAD, LAYERS = 512, 64, 4
_PATCH = 16
# Numbers of patches, and the side of a square image that has about so many.
_SIDES = {32: 6 * _PATCH, 512: 22 * _PATCH, 1024: 32 * _PATCH, 2048: 45 * _PATCH}
_LATENTS = 32
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _decoder(tokens: int) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_attention_heads": WIDTH // HEAD,
        "num_key_value_heads": WIDTH // HEAD // 2,
        "num_hidden_layers": LAYERS,
        "intermediate_size": WIDTH * 8 // 3 // 64 * 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": tokens,
    }


def _encoder(tokens: int) -> dict[str, Any]:
    sizes = _decoder(tokens) | {"intermediate_size": 4 * WIDTH} | _NO_DROPOUT
    del sizes["num_key_value_heads"]
    return sizes


def _t5(feed_forward: str) -> dict[str, Any]:
    return {
        "d_model": WIDTH,
        "num_heads": WIDTH // HEAD,
        "d_kv": HEAD,
        "num_layers": LAYERS // 2,
        "d_ff": 4 * WIDTH if feed_forward == "relu" else WIDTH * 8 // 3 // 64 * 64,
        "vocab_size": VOCABULARY,
        "dropout_rate": 0.0,
        "feed_forward_proj": feed_forward,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }


def _whisper(tokens: int) -> dict[str, Any]:
    common = ("attention_heads", WIDTH // HEAD), ("ffn_dim", 4 * WIDTH), ("layers", LAYERS // 2)
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in common}
    token_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    positions = {"max_source_positions": tokens, "max_target_positions": tokens}
    model = {"d_model": WIDTH, "vocab_size": VOCABULARY, "dropout": 0.0, "num_mel_bins": 80}
    return sizes | token_ids | positions | model


def _clip(tokens: int) -> dict[str, Any]:
    text = _encoder(tokens) | {"num_hidden_layers": LAYERS // 2}
    for name in _NO_DROPOUT:
        del text[name]
    vision = {k: v for k, v in text.items() if k not in ("vocab_size", "max_position_embeddings")}
    return {
        "text_config": text,
        "vision_config": vision | {"image_size": _SIDES[tokens], "patch_size": _PATCH},
    }


def _gpt2(tokens: int) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    sizes = {"n_embd": WIDTH, "n_head": WIDTH // HEAD, "n_layer": LAYERS, "n_positions": tokens}
    return sizes | dropout | {"vocab_size": VOCABULARY}


def _wav2vec2(tokens: int) -> dict[str, Any]:
    """Its convolutions make a token of 320 samples."""
    kinds = ("feat_proj", "final", "activation", "hidden", "attention")
    no_dropout = {f"{kind}_dropout": 0.0 for kind in kinds} | {"layerdrop": 0.0, "apply_spec_augment": False}
    sizes = {k: v for k, v in _encoder(tokens).items() if k not in ("max_position_embeddings", *_NO_DROPOUT)}
    return sizes | no_dropout | {"ctc_zero_infinity": True}


def _mamba(tokens: int) -> dict[str, Any]:
    return {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 16}


def _convnext(tokens: int) -> dict[str, Any]:
    return {"hidden_sizes": [96, 192, 384, 768], "depths": [1, 1, 2, 1]}


# transformers' config and model, and a function of the number of tokens that gives the config's arguments.
MODELS: dict[str, tuple[str, str, Callable[[int], dict[str, Any]]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "BERT": ("BertConfig", "BertForMaskedLM", _encoder),
    "RoBERTa": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        lambda n: _encoder(n) | {"max_position_embeddings": n + 2},
    ),
    "ViT": (
        "ViTConfig",
        "ViTForImageClassification",
        lambda n: (
            {k: v for k, v in _encoder(n).items() if k not in ("vocab_size", "max_position_embeddings")}
            | {"image_size": _SIDES[n]}
        ),
    ),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _decoder),
    "Mistral": ("MistralConfig", "MistralForCausalLM", _decoder),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", lambda n: _decoder(n) | {"head_dim": HEAD}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", lambda n: _decoder(n) | {"head_dim": HEAD}),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", lambda n: _decoder(n) | {"pad_token_id": 0}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", lambda n: _decoder(n) | {"num_local_experts": 4}),
    "T5": ("T5Config", "T5ForConditionalGeneration", lambda n: _t5("relu")),
    "T5, gated": ("T5Config", "T5ForConditionalGeneration", lambda n: _t5("gated-gelu")),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _whisper),
    "CLIP": ("CLIPConfig", "CLIPModel", _clip),
    "ConvNeXt": ("ConvNextConfig", "ConvNextForImageClassification", _convnext),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", lambda n: _decoder(n) | {"head_dim": HEAD}),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _encoder),
    "wav2vec 2.0": ("Wav2Vec2Config", "Wav2Vec2ForCTC", _wav2vec2),
    "Mamba": ("MambaConfig", "MambaForCausalLM", _mamba),
}
NAMES = (*MODELS, *timm_nets.NETS, *diffusion_nets.NETS)
OF_IMAGES = ("ConvNeXt", *timm_nets.NETS)  # image nets, which have no gradient_checkpointing_enable
_CACHES = (  # models that would keep keys and values for generation
    "GPT-2", "Llama", "Mistral", "Qwen3", "Gemma", "Phi-3", "Mixtral", "T5", "T5, gated", "Whisper", "Gemma 2",
    "GPT-NeoX", "Mamba",
)  # fmt: skip


def build(name: str, tokens: int, **changes: Any) -> nn.Module:
    """The model in training mode, its dropout at 0, the same weights every time.

    changes: to its config's arguments; not for timm's and diffusers' nets.
    """
    torch.manual_seed(0)
    if name in timm_nets.NETS:
        return timm_nets.build(name).train()
    if name in diffusion_nets.NETS:
        return diffusion_nets.build(name, _LATENTS).train()
    import transformers

    config, model, arguments = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**arguments(tokens) | changes)).train()


def batch(name: str, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """One sequence of ``tokens``, with what the model needs for a loss; for CLIP two. For 512 tokens ConvNeXt, UNet and
    DiT get two images, timm's nets four.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (1, tokens), generator=generator)
    side = _SIDES.get(tokens, 0)
    if name == "ViT":
        inputs = {
            "pixel_values": torch.randn(1, 3, side, side, generator=generator),
            "labels": torch.tensor([1]),
        }
    elif name in OF_IMAGES:
        images = tokens // (256 if name == "ConvNeXt" else 128)
        pixels = torch.randn(images, 3, 224, 224, generator=generator)
        inputs = {"pixel_values": pixels, "labels": torch.arange(images) % 2}
    elif name in diffusion_nets.NETS:
        images, channels = tokens // 256, diffusion_nets.CHANNELS[name]
        sample, noise = torch.randn(2, images, channels, _LATENTS, _LATENTS, generator=generator)
        inputs = {"sample": sample, "noise": noise, "timestep": torch.arange(images) * 100}
        inputs |= {"class_labels": torch.arange(images)} if name == "DiT" else {}
    elif name == "wav2vec 2.0":
        sound = torch.randn(1, 320 * tokens + 80, generator=generator)
        inputs = {"input_values": sound, "labels": ids[:, : tokens // 8] % 31 + 1}
    elif name == "Whisper":
        inputs = {"input_features": torch.randn(1, 80, 2 * tokens, generator=generator), "labels": ids}
    elif name == "CLIP":
        pixels = torch.randn(2, 3, side, side, generator=generator)
        inputs = {"pixel_values": pixels, "input_ids": torch.cat((ids, ids.flip(1)))}
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()} | {"return_loss": True}
    else:
        inputs = {"input_ids": ids, "labels": ids}
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs | ({"use_cache": False} if name in _CACHES else {})


def tensors(inputs: dict[str, Any]) -> Iterator[Tensor]:
    return (value for value in inputs.values() if isinstance(value, Tensor))
