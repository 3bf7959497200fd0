"""Loads models and tokenizers of transformers: from a folder, from the Hub, or with random weights.

Code that comes with a model is never run (``trust_remote_code=False``) and pickles are read with ``weights_only=True``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..planner.built_in import MODELS as BUILT_IN
from ..planner.built_in import built_in
from ..planner.models import check_length, set_dropout
from ..techniques.applying import weight_dtype
from ..techniques.options import OptionError, refused
from .config import MODELS, TrainConfig

SAFE = {"trust_remote_code": False}
ALLOWED = f"{', '.join(MODELS)}, a folder that save_pretrained wrote, and a name on the Hugging Face Hub are allowed"


def load_config(config: TrainConfig) -> Any:
    """The configuration of a causal language model. Raises OptionError for what is none, and for quantized weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = config.model
    if config.from_config and name in BUILT_IN and not Path(name).is_dir():
        hf_config = built_in(name)
    else:
        with refused("model", f"{name!r} given, whose configuration cannot be used ({ALLOWED})"):
            hf_config = AutoConfig.from_pretrained(name, **SAFE)
    if getattr(hf_config, "quantization_config", None) is not None:
        if not config.from_config:
            text = f"{name!r} given, whose weights are quantized and would stay as they are; allowed: unquantized"
            raise OptionError("model", f"{text} weights, or --from-config; adapters are trained by PEFT")
        del hf_config.quantization_config
    classes = CLASSES.get(hf_config.model_type)
    if classes is None:
        text = f"{name!r} given, of type {hf_config.model_type}, of which transformers has no causal language model"
        raise OptionError("model", f"{text}; {ALLOWED}")
    hf_config.architectures = [classes if isinstance(classes, str) else classes[0]]
    check_length(hf_config, config.seq_len)
    return hf_config


def build(config: TrainConfig) -> nn.Module:
    """The model in the techniques' dtype, built in it: no copy in another one is made."""
    from transformers import AutoModelForCausalLM

    hf_config = load_config(config)
    if config.dropout is not None:
        set_dropout(hf_config, config.dropout)
    hf_config.use_cache = False
    options: dict[str, Any] = {"dtype": weight_dtype(config), **SAFE}
    with refused("model", f"{config.model!r} given, which cannot be built"):
        if config.from_config:
            return AutoModelForCausalLM.from_config(hf_config, **options).train()
        options |= {"config": hf_config, "weights_only": True, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(config.model, **options)
        if info["missing_keys"]:
            raise ValueError(f"it lacks the weights {', '.join(sorted(info['missing_keys'])[:3])}")
        return model.train()


def load_tokenizer(config: TrainConfig) -> Any:
    """The model's tokenizer, or None for bytes. Raises OptionError for a tokenizer that has more ids than the model."""
    from transformers import AutoTokenizer

    name, size, tokenizer = config.model, load_config(config).get_text_config().vocab_size, None
    if not config.bytes:
        with refused("model", f"{name!r} given, whose tokenizer cannot be used; allowed: with --bytes"):
            tokenizer = AutoTokenizer.from_pretrained(name, **SAFE)
            # Without a tokenizer's files transformers makes an empty one.
            if {*tokenizer("memkern")["input_ids"]} <= {*tokenizer.all_special_ids}:
                raise ValueError("it knows no text")
    needed = 256 if tokenizer is None else len(tokenizer)
    if needed > size:
        text = f"given with {name}, whose vocabulary of {size} is smaller than the tokenizer's {needed}"
        raise OptionError("bytes" if config.bytes else "model", text)
    return tokenizer
