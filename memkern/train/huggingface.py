"""Models and tokenizers of transformers: from a folder, from the Hub, or with random weights.

Code that comes with a model is never run (``trust_remote_code=False``) and pickles are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..applying import weight_dtype
from ..options import OptionError
from ..planner.built_in import MODELS as BUILT_IN
from ..planner.models import positions, resolve, set_dropout
from .config import MODELS, TrainConfig
from .tokenizers import Bytes, FromTransformers, Tokenizer, train_bpe

SAFE = {"trust_remote_code": False}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CLASSIFIER = "ForSequenceClassification"
ADAPTERS = "adapters are trained by PEFT with an optimizer of memkern.optim"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model")


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def named(what: str, given: str, cure: str) -> Iterator[None]:
    """Whatever transformers raises for a file or a name becomes an OptionError of one line."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:  # the libraries below raise all kinds: OSError, ValueError, SafetensorError, KeyError
        raise OptionError("model", f"{given!r}: {what}: {first_line(error)}; {cure}") from error


def quiet() -> None:
    """transformers' warnings and bars off: what is wrong is said in one line, what was done in the report."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_config(config: TrainConfig) -> Any:
    """The model's configuration. Raises OptionError for a folder that is none, and for a name that nobody has."""
    from transformers import AutoConfig

    quiet()
    name, path = config.model, Path(config.model)
    allowed = f"allowed: {', '.join(MODELS)}, a folder that save_pretrained wrote, or a name on the Hugging Face Hub"
    if (path / "adapter_config.json").is_file():
        text = f"{name!r} given, adapters of PEFT; allowed: a whole model, as merge_and_unload() makes it; {ADAPTERS}"
        raise OptionError("model", text)
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        kind = "a file" if path.is_file() else "a folder without config.json"
        raise OptionError("model", f"{name!r} given, {kind}; {allowed}")
    if path.is_dir():
        with named("config.json cannot be used", name, "allowed: a folder that save_pretrained wrote"):
            return trainable(AutoConfig.from_pretrained(path, **SAFE), config)
    if config.from_config and name in BUILT_IN:
        source: Any = resolve(name, 1, None, None, None)
        return source.config
    if not HUB_NAME.fullmatch(name):
        raise OptionError("model", f"{name!r} given, which is no folder and no name; {allowed}")
    with named("no such model could be had from the Hugging Face Hub", name, allowed):
        return trainable(AutoConfig.from_pretrained(name, **SAFE), config)


def trainable(hf_config: Any, config: TrainConfig) -> Any:
    """The configuration for random weights without its quantization. Raises OptionError for quantized weights."""
    given = getattr(hf_config, "quantization_config", None)
    if given is None:
        return hf_config
    if config.from_config:
        del hf_config.quantization_config
        return hf_config
    options = given if isinstance(given, dict) else given.to_dict()
    method = str(options.get("quant_method", "unknown"))
    bits = next((f" in {n} bits" for n in (4, 8) if options.get(f"load_in_{n}bit")), "")
    raise OptionError(
        "model",
        f"{config.model!r} given, whose weights are quantized ({method}{bits}) and would stay as they are; "
        f"allowed: unquantized weights, or --from-config; {ADAPTERS}",
    )


def check_seq_len(config: TrainConfig, hf_config: Any) -> None:
    most = positions(hf_config)
    if most is not None and config.seq_len > most:
        raise OptionError("seq_len", f"{config.seq_len} given; allowed: 1 to {most}, the positions of {config.model}")


def has_tokenizer(name: str) -> bool:
    path = Path(name)
    return (
        any((path / file).is_file() for file in TOKENIZER_FILES)
        if path.is_dir()
        else HUB_NAME.fullmatch(name) is not None
    )


def load_tokenizer(config: TrainConfig, hf_config: Any, texts: Sequence[str]) -> Tokenizer:
    """The model's own; where it has none, or the weights are random and it is in no folder, a BPE of the text's."""
    tokenizer: Tokenizer
    size = hf_config.get_text_config().vocab_size
    if config.bytes:
        tokenizer = Bytes()
    elif has_tokenizer(config.model) and (Path(config.model).is_dir() or not config.from_config):
        from transformers import AutoTokenizer

        with named("its tokenizer cannot be read", config.model, "allowed: --bytes, or a folder without a tokenizer"):
            tokenizer = FromTransformers(AutoTokenizer.from_pretrained(config.model, **SAFE))
    else:
        return train_bpe(texts, size)
    if tokenizer.size > size:
        raise OptionError(
            "bytes" if config.bytes else "model",
            f"given with {config.model}, whose vocabulary of {size} is smaller than the tokenizer's {tokenizer.size}",
        )
    return tokenizer


def auto_class(hf_config: Any) -> Any:
    """transformers' auto class. Raises OptionError for a classifier, and where this type has no language model."""
    from transformers import AutoModelForCausalLM

    kind = f"a model of type {hf_config.model_type}, of which transformers has no causal language model"
    if any(CLASSIFIER in name for name in getattr(hf_config, "architectures", None) or ()):
        kind = "a sequence classifier"
    elif type(hf_config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    raise OptionError("model", f"given with {kind}; allowed: a causal language model")


def architecture(hf_config: Any) -> str:
    """The name of transformers' class."""
    found = auto_class(hf_config)._model_mapping[type(hf_config)]
    return (found[0] if isinstance(found, tuple) else found).__name__


def build(config: TrainConfig, hf_config: Any) -> nn.Module:
    """The model in the techniques' dtype, built in it: no copy in another one is made."""
    auto = auto_class(hf_config)
    hf_config = copy.deepcopy(hf_config)
    if config.dropout is not None:
        set_dropout(hf_config, config.dropout)
    hf_config.use_cache = False
    dtype = weight_dtype(config.techniques)
    with named("cannot be built", config.model, "allowed: a causal language model"):
        if config.from_config:
            return auto.from_config(hf_config, dtype=dtype, **SAFE).train()
        model = auto.from_pretrained(config.model, config=hf_config, dtype=dtype, weights_only=True, **SAFE)
        return model.train()


def export(model: Any, weights: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Writes files that ``from_pretrained`` reads: configuration, weights in safetensors, tokenizer.

    They are in the folder once all are written. Raises OSError where they cannot be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
            model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save(Path(temporary))
            for path in Path(temporary).iterdir():
                os.replace(path, folder / path.name)
    except Exception as error:  # safetensors' SafetensorError is no OSError
        raise OSError(f"{folder}: {first_line(error)}") from error
