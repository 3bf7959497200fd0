"""``memkern.plan``: what a training step needs with each technique, and which techniques to use."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..techniques.options import NOT_NEGATIVE, WAYS_OF_SAVING, OptionError, Techniques, at_least, not_allowed
from . import fake_cuda
from .choice import Chooser
from .hardware import DEFAULTS, Hardware, default
from .outcome import Plan
from .prediction import BAND, ON_CPU_TENSORS, NotTraced, Prediction, Predictor

OTHERS: dict[str, dict[str, Any]] = {
    "bf16 autocast": {"precision": "bf16-mixed"},
    "8-bit states": {"state_bits": 8},
    "randomized linear, 20 %": {"linear_share": 0.2},
    "bf16 weights, 8-bit errors": {"precision": "bf16", "master_weights": "bf16+8"},
    "step in backward": {"step_in_backward": True, "accumulation": 1},
    "loss in chunks": {"loss_chunk": 4096},
    "states on the host": {"offload": "device"},
    "states and step on the host": {"offload": "cpu"},
    "weights on the host": {"weights_on_host": "layers"},
}
ROWS = WAYS_OF_SAVING | OTHERS
"""The rows of the table: each technique by itself. Those with ``compile`` take seconds of the compiler each."""
UNSHARDED: dict[str, Any] = {
    "step_in_backward": False, "offload": None, "loss_chunk": None, "saved_bits": None,
    "checkpoint_bits": None, "checkpoint_every": 1, "weights_on_host": None, "compile": False, "memory_budget": None,
}  # fmt: skip
"""Techniques that are not counted with shards: with several devices they stay as they are here."""

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_memory(given: Any, name: str = "memory") -> int:
    """Bytes: a whole number, or a text such as "12GiB", "11.5 GiB", "800MB". name: the argument, for the error.

    Raises:
        OptionError: anything else, and less than a byte.
    """
    text = str(int(given) if isinstance(given, float) and given.is_integer() else given)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    known = match is not None and match[2] in UNITS and not isinstance(given, bool)
    size = int(float(match[1]) * UNITS[match[2]]) if match and known else 0
    if size < 1:
        raise not_allowed(name, given, "bytes as a number, or with a unit: 12GiB, 800MB")
    return size


def plan(
    model: Any,
    *,
    memory: int | str,
    seq_len: int | None = None,
    inputs: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str = "cuda",
    techniques: Techniques | Mapping[str, Any] | None = None,
    batch_size: int = 1,
    clip: float = 0.0,
    dropout: float | None = None,
    hardware: Hardware | None = None,
    host_memory: int | str | None = None,
    devices: int = 1,
    attention_mask: bool = False,
) -> Plan:
    """Predicts what a training step needs, by category and technique, and chooses techniques that make it fit.

    The model's own modules run forward and backward on fake tensors, which compute nothing; every storage is followed
    from the operator that allocates it until it is freed. For ``device="cuda"`` in a process of its own with fake CUDA
    tensors where there is a compiler, or in this one where torch has a GPU; else on fake CPU tensors, which differ
    in attention and dropout masks, with a warning. ``Plan.band`` says how far predictions may be off; they err high.

    Args:
        model: a built-in name (``memkern.planner.built_in.MODELS``: gpt2-xl, bert-base, llama-3.1-8b, ...), a
            folder with a transformers model, a transformers configuration, or a torch.nn.Module, which is left as is.
        memory: bytes, or a text such as "12GiB": all that a process may use on the device, context included.
        seq_len: tokens of a sequence; for configurations, but not for images. None: 2,048, or the model's positions.
        inputs: for a module, a batch: a tensor, a tuple of arguments or a dict of keyword arguments, whose tensors
            have the batch as their first dimension.
        loss: ``loss(model, batch)`` returns the loss; by default the output's ``loss``, the output where it is
            one number, else the sum of the first tensor of the output.
        device: "cuda" or "cpu".
        techniques: None, to choose among all; a mapping of fields of :class:`Techniques` that are given, to choose the
            others; or Techniques, to predict just these. ``compile`` is chosen where it is given; its rows are there
            unless it is given as False: every block is compiled up to its kernels.
        batch_size: sequences of an optimizer step. Several may be accumulated, which rules a step in backward out.
        clip: the norm that the gradients are clipped to, 0 for no clipping; clipping rules a step in backward out too.
        dropout: all of the configuration's dropout rates; None, as they are.
        hardware: speeds; by default those of a card of 12 GB, or of two CPU cores.
        host_memory: bytes on the host that offload and weights_on_host may use, or a text such as "64GiB"; None, any.
        devices: how many share the parameters, gradients and states: FSDP2, ``fully_shard`` for each block and then for
            the model, or HSDP with so many in a group. Bytes are those of the one with the largest shards;
            ``batch_size`` is of each device; times are without the collectives. Techniques that are not counted with
            shards (``UNSHARDED``) are not chosen.
        attention_mask: whether sequences end in padding, which a mask of seq_len x seq_len tells: for configurations
            that take tokens.

    Raises:
        OptionError: an argument that cannot be used, with what was given and what is allowed.
        TypeError: model is none of the above.
    """
    arguments = locals()  # all arguments, before anything else is a local
    limit = parse_memory(memory)
    if device not in DEFAULTS:
        raise not_allowed("device", device, "cuda or cpu")
    for name, value, allowed in (
        ("batch_size", batch_size, at_least(1)), ("devices", devices, at_least(1)), ("clip", clip, NOT_NEGATIVE),
    ):  # fmt: skip
        if not allowed.accepts(value):
            raise not_allowed(name, value, allowed.words)
    given = _given(techniques, devices)
    host_limit = None if host_memory is None else parse_memory(host_memory, "host_memory")

    def source() -> Any:
        from .models import resolve  # which imports torch

        return resolve(model, seq_len, inputs, loss, dropout, attention_mask)

    why = None
    if device == "cuda" and not _has_cuda():
        if "torch" in sys.modules:
            source()  # whose errors need no other process
        why = fake_cuda.why_not()
        if why is None:
            try:
                return fake_cuda.call(plan, **arguments)
            except RuntimeError as error:
                why = str(error)
    resolved = source()
    if why is not None:
        warnings.warn(f"memkern.plan counts on fake CPU tensors, with a wider band: {why}", stacklevel=2)
    counted_on = device if why is None else ON_CPU_TENSORS
    predictor = Predictor(resolved, device, counted_on, hardware or default(device), devices)
    with contextlib.ExitStack() as stack:
        compares = given.get("compile", predictor.has_blocks)
        if compares:
            from .graphs import session

            stack.enter_context(session())
        rows = {name: changes for name, changes in ROWS.items() if compares or not changes.get("compile")}
        outcome = _choose(predictor, Chooser(predictor, given, batch_size, clip, host_limit), limit, rows)
    return dataclasses.replace(outcome, not_on_cuda=why)


def _has_cuda() -> bool:
    """Whether torch has a GPU, or fake CUDA. Imports no torch that was not built for GPUs."""
    if not (fake_cuda.torch_has_gpus() or "torch" in sys.modules):
        return False
    import torch

    return torch.cuda.is_available()


def _given(techniques: Any, devices: int) -> dict[str, Any]:
    """The techniques that are given, and with several devices those of ``UNSHARDED``. Raises OptionError."""
    given = dataclasses.asdict(techniques) if isinstance(techniques, Techniques) else dict(techniques or {})
    names = [field.name for field in dataclasses.fields(Techniques)]
    for name in given:
        if name not in names:
            raise not_allowed("techniques", name, ", ".join(names))
    # Checks the values, with others that they need: the planner chooses those that are not given.
    needed: dict[str, Any] = {"precision": "bf16"} if given.get("master_weights") else {}
    needed |= {"compile": True} if given.get("saved_bits") and "compile" not in given else {}
    needed |= (
        {"checkpointing": "blocks"} if given.get("checkpoint_bits") or given.get("checkpoint_every", 1) != 1 else {}
    )
    Techniques(**needed | given)
    if devices == 1:
        return given
    for name, plain in UNSHARDED.items():
        if given.get(name, plain) != plain:
            raise not_allowed(name, given[name], f"{plain!r} with devices above 1")
    if given.get("optimizer") == "muon":
        raise not_allowed("optimizer", "muon", "one whose step needs no other device's shards, with devices above 1")
    return UNSHARDED | given


def _alone(predictor: Predictor, rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Each technique's prediction by itself, and the errors of those with which the model's step raises; by row."""
    alone: dict[str, Prediction] = {}
    ruled_out: dict[str, str] = {}
    for name, changes in rows.items():
        if {"offload", "weights_on_host"} & changes.keys() and predictor.device == "cpu":
            continue
        if UNSHARDED.keys() & changes.keys() and predictor.devices > 1:
            continue
        try:
            alone[name] = predictor.predict(Techniques(micro_batch=predictor.least_batch, **changes))
        except NotTraced as error:
            if not changes:
                raise
            ruled_out[name] = error.message
        except OptionError:  # techniques that the model does not take: the row is left out
            pass
    return alone, ruled_out


def _choose(predictor: Predictor, chooser: Chooser, memory: int, rows: dict[str, dict[str, Any]]) -> Plan:
    """The plan: predictions for all rows, and the fastest techniques that fit."""
    source, given, batch_size = predictor.source, chooser.given, chooser.batch_size
    alone, ruled_out = _alone(predictor, rows)
    limit = int(memory / (1 + BAND[predictor.counted_on][0]))
    best = chooser.fastest(limit)
    largest = 0
    if best is not None:
        largest = chooser.largest_micro_batch(best.techniques, limit)
        if best.techniques.accumulation > 1 and "micro_batch" not in given:
            micro = max(size for size in range(1, largest + 1) if batch_size % size == 0)
            larger = best.techniques.replace(micro_batch=micro, accumulation=batch_size // micro)
            best = predictor.predict(larger)
    return Plan(
        model=source.name,
        parameters=predictor.static_bytes(Techniques()).count,
        device=predictor.device,
        seq_len=source.tokens,
        memory=memory,
        alone=alone,
        together=chooser.smallest(),
        recommended=best,
        largest_micro_batch=largest,
        counted_on=predictor.counted_on,
        fits_as_it_is=predictor.predict(Techniques(micro_batch=batch_size)).peak <= limit,
        loss=source.loss_code,
        link=predictor.hardware.link,
        ruled_out=ruled_out,
        devices=predictor.devices,
    )
