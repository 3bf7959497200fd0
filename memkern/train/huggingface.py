"""Models and tokenizers of transformers: from a folder, from the Hub, or with random weights.

Code that comes with a model is never run (``trust_remote_code=False``) and pickles are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.built_in import MODELS as BUILT_IN
from ..planner.built_in import built_in
from ..planner.models import positions, set_dropout
from ..techniques.applying import weight_dtype
from ..techniques.options import OptionError
from .config import MODELS, TrainConfig
from .data import Bytes

SAFE = {"trust_remote_code": False}
ALLOWED = f"allowed: {', '.join(MODELS)}, a folder that save_pretrained wrote, or a name on the Hugging Face Hub"
ADAPTERS = "adapters are trained by PEFT with an optimizer of memkern.optim"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model")
CHARACTERS = 2**20  # of text encoded at once: an encoding takes some 100 bytes per token


@contextlib.contextmanager
def named(what: str, given: str, cure: str) -> Iterator[None]:
    """Whatever transformers raises for a file or a name becomes an OptionError of one line."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:  # the libraries below raise all kinds: OSError, ValueError, SafetensorError, KeyError
        raise OptionError("model", f"{given!r}: {what}: {first_line(error)}; {cure}") from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_config(config: TrainConfig) -> Any:
    """The configuration of a causal language model. Raises OptionError for what is none, and for quantized weights."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name, path = config.model, Path(config.model)
    if (path / "adapter_config.json").is_file():
        text = f"{name!r} given, adapters of PEFT; allowed: a whole model, as merge_and_unload() makes it; {ADAPTERS}"
        raise OptionError("model", text)
    if config.from_config and name in BUILT_IN and not path.is_dir():
        found = built_in(name)
    else:
        with named("its configuration cannot be used", name, ALLOWED):
            found = AutoConfig.from_pretrained(name, **SAFE)
    check_weights(found, config)
    architecture(found)
    most = positions(found)
    if most is not None and config.seq_len > most:
        raise OptionError("seq_len", f"{config.seq_len} given; allowed: 1 to {most}, the positions of {config.model}")
    return found


def check_weights(hf_config: Any, config: TrainConfig) -> None:
    """Takes the quantization out of a configuration for random weights. Raises OptionError for quantized weights."""
    given = getattr(hf_config, "quantization_config", None)
    if given is None:
        return
    if not config.from_config:
        method = (given if isinstance(given, dict) else given.to_dict()).get("quant_method", "unknown")
        text = f"{config.model!r} given, whose weights are quantized ({method}) and would stay as they are"
        raise OptionError("model", f"{text}; allowed: unquantized weights, or --from-config; {ADAPTERS}")
    del hf_config.quantization_config


def architecture(hf_config: Any) -> str:
    """The name of transformers' class. Raises OptionError where this configuration has no causal language model."""
    from transformers import AutoModelForCausalLM

    kind = f"a model of type {hf_config.model_type}, of which transformers has no causal language model"
    if any("ForSequenceClassification" in name for name in getattr(hf_config, "architectures", None) or ()):
        kind = "a sequence classifier"
    elif type(hf_config) in AutoModelForCausalLM._model_mapping:
        found = AutoModelForCausalLM._model_mapping[type(hf_config)]
        return (found[0] if isinstance(found, tuple) else found).__name__
    raise OptionError("model", f"given with {kind}; allowed: a causal language model")


def build(config: TrainConfig, hf_config: Any) -> nn.Module:
    """The model in the techniques' dtype, built in it: no copy in another one is made."""
    from transformers import AutoModelForCausalLM

    hf_config = copy.deepcopy(hf_config)
    if config.dropout is not None:
        set_dropout(hf_config, config.dropout)
    hf_config.use_cache = False
    options: dict[str, Any] = {"dtype": weight_dtype(config.techniques), **SAFE}
    with named("cannot be built", config.model, "allowed: a causal language model"):
        if config.from_config:
            return AutoModelForCausalLM.from_config(hf_config, **options).train()
        model = AutoModelForCausalLM.from_pretrained(config.model, config=hf_config, weights_only=True, **options)
        return model.train()


class Pretrained:
    """A tokenizer of transformers; its end token ends a document."""

    unit = "token"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.end = [next(i for i in ends if i is not None)] if any(i is not None for i in ends) else []

    def ids(self, documents: Sequence[str]) -> Tensor:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        cut = [(piece, end) for document in documents for piece, end in pieces(document, self.end)]
        found: list[Tensor] = []
        for begin in range(0, len(cut), 64):  # many at a time: by all cores
            texts, ends = zip(*cut[begin : begin + 64], strict=True)
            encoded = self.tokenizer(list(texts), **options)["input_ids"]
            found += [torch.tensor(ids + end, dtype=torch.int32) for ids, end in zip(encoded, ends, strict=True)]
        return torch.cat(found)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def pieces(text: str, end: list[int]) -> Iterator[tuple[str, list[int]]]:
    """A text that is longer than CHARACTERS cut before lines, and what follows each piece: ``end`` the last one."""
    begin = 0
    while len(text) - begin > CHARACTERS:
        cut = text.rfind("\n", begin + 1, begin + CHARACTERS)
        cut = begin + CHARACTERS if cut < 0 else cut
        yield text[begin:cut], []
        begin = cut
    yield text[begin:], end


def load_tokenizer(config: TrainConfig, hf_config: Any) -> Any:
    """The model's own, or bytes. Raises OptionError for a tokenizer that has more ids than the model."""
    from transformers import AutoTokenizer

    tokenizer: Any = Bytes()
    folder = Path(config.model)
    if not config.bytes:
        # Without its files transformers makes one that knows no text.
        if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise OptionError("model", f"{config.model!r} given, a folder without a tokenizer; allowed: with --bytes")
        with named("it has no tokenizer that can be read", config.model, "allowed: --bytes, or a model with one"):
            tokenizer = Pretrained(AutoTokenizer.from_pretrained(config.model, **SAFE))
    size = hf_config.get_text_config().vocab_size
    if tokenizer.size > size:
        text = f"given with {config.model}, whose vocabulary of {size} is smaller than the tokenizer's {tokenizer.size}"
        raise OptionError("bytes" if config.bytes else "model", text)
    return tokenizer


def export(model: Any, weights: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Writes files that ``from_pretrained`` reads: configuration, weights in safetensors, tokenizer.

    They are in the folder once all are written. Raises OSError where they cannot be.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
            model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save(Path(temporary))
            for path in Path(temporary).iterdir():
                os.replace(path, folder / path.name)
    except Exception as error:  # safetensors' SafetensorError is no OSError
        raise OSError(f"{folder}: {first_line(error)}") from error
