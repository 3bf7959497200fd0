"""``memkern.plan``: what a training step needs with each technique, and which techniques to use."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..options import NOT_NEGATIVE, OptionError, Techniques, at_least, not_allowed
from . import fake_cuda
from .choice import Chooser
from .hardware import DEFAULTS, LINKS, Hardware, default
from .not_traced import NotTraced
from .outcome import Plan
from .prediction import BAND, Prediction, Predictor
from .smaller import Asked, would_fit

ALONE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "checkpoint every block": {"checkpointing": "blocks"},
    "checkpoint every other block": {"checkpointing": "blocks", "checkpoint_every": 2},
    "bf16 autocast": {"precision": "bf16-mixed"},
    "8-bit states": {"state_bits": 8},
    "3-bit activations": {"activation_bits": 3},
    "checkpoints in 8 bits": {"checkpointing": "blocks", "checkpoint_bits": 8},
    "randomized linear, 20 %": {"linear_share": 0.2},
    "bf16 weights, 8-bit errors": {"precision": "bf16", "master_weights": "bf16+8"},
    "step in backward": {"step_in_backward": True, "accumulation": 1},
    "loss in chunks": {"loss_chunk": 4096},
    "offload": {"offload": True},
    "weights on the host": {"weights_on_host": "layers"},
}
"""The rows of the table: each technique by itself."""
COMPILED: dict[str, dict[str, Any]] = {
    "compiled blocks": {"compile": True},
    "compiled, saved once (exact)": {"compile": True, "saved_bits": "exact"},
    "compiled, saved in 8 bits": {"compile": True, "saved_bits": 8},
    "compiled, checkpoint every block": {"compile": True, "checkpointing": "blocks"},
}
"""Rows beside these where ``compile`` is given: each takes seconds of the compiler."""
UNSHARDED: dict[str, Any] = {
    "step_in_backward": False, "offload": False, "loss_chunk": None, "saved_bits": None,
    "checkpoint_bits": None, "checkpoint_every": 1, "weights_on_host": None, "compile": False, "memory_budget": None,
}  # fmt: skip
"""Techniques that are not counted with shards: with several devices they stay as they are here."""
ON_CPU_TENSORS = "cuda, on fake CPU tensors"


def parse_memory(given: Any, name: str = "memory") -> int:
    """Bytes: a whole number, or a text such as "12GiB", "11.5 GiB", "800MB". name: the argument, for the error.

    Raises:
        OptionError: anything else, and less than a byte.
    """
    factors = {"": 1, "b": 1} | {
        f"{prefix}{ending}": base**power
        for power, prefix in enumerate("kmgt", 1)
        for ending, base in (("b", 1000), ("ib", 1024))
    }
    text = str(int(given) if isinstance(given, float) and given.is_integer() else given)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    known = match is not None and match[2] in factors and not isinstance(given, bool)
    size = int(float(match[1]) * factors[match[2]]) if match and known else 0
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
    link: str | None = None,
    devices: int = 1,
    tensor_parallel: int = 1,
    attention_mask: bool = False,
    cache: bool = True,
) -> Plan:
    """Predicts what a training step needs, by category and technique, and chooses techniques that make it fit.

    The model's own modules run forward and backward on fake tensors, which compute nothing; every storage is followed
    from the operator that allocates it until it is freed. For ``device="cuda"`` in a process of its own with fake CUDA
    tensors where there is a compiler, or in this one where torch has a GPU; else on fake CPU tensors, which differ
    in attention and dropout masks. ``Plan.band`` says how far predictions may be off; they err high.

    Args:
        model: a built-in name (``memkern.planner.built_in.MODELS``: gpt2-xl, bert-base, llama-2-7b, vit-base, ...), a
            folder with a transformers model, a transformers configuration, or a torch.nn.Module, which is left as is.
        memory: bytes, or a text such as "12GiB": all that a process may use on the device, context included.
        seq_len: tokens of a sequence; for configurations, but not for images. None: 2,048, or the model's positions.
        inputs: for a module, a batch: a tensor, a tuple of arguments or a dict of keyword arguments, whose tensors
            have the batch as their first dimension.
        loss: ``loss(model, batch)`` returns the loss; by default the output's ``loss``, the output where it is
            one number, else the sum of the first tensor of the output.
        device: "cuda" or "cpu".
        techniques: None, to choose among all; a mapping of fields of :class:`Techniques` that are given, to choose the
            others; or Techniques, to predict just these. ``compile`` is not chosen: where it is given, every block is
            compiled up to its kernels, and their times are those of uncompiled blocks.
        batch_size: sequences of an optimizer step. Several may be accumulated, which rules a step in backward out.
        clip: the norm that the gradients are clipped to, 0 for no clipping; clipping rules a step in backward out too.
        dropout: all of the configuration's dropout rates; None, as they are.
        hardware: speeds; by default those of a card of 12 GB, or of two CPU cores.
        host_memory: bytes on the host that offload and weights_on_host may use, or a text such as "64GiB"; default any
            number.
        link: between host and device, in place of the hardware's: "pcie4" and "pcie5" (x16), "c2c".
        devices: how many share the parameters, gradients and states: FSDP2, ``fully_shard`` for each block and then for
            the model, or HSDP with so many in a group. Bytes are those of the one with the largest shards, with the
            blocks that are gathered meanwhile; ``batch_size`` is of each device. Times are without the collectives.
            Techniques are then chosen among those that ``fully_shard`` is counted with (``UNSHARDED`` has the others).
        tensor_parallel: how many devices share the layers of transformers' ``tp_plan`` (column-wise, row-wise; torch's
            DTensor). Bytes and operations are those of one, which has the same ``batch_size`` as all of them. For
            configurations whose model has a plan, and without ``devices``.
        attention_mask: whether sequences end in padding, which a mask tells: for configurations that take tokens. Most
            attention then reads a mask of seq_len x seq_len for each sequence.
        cache: plans of configurations are kept in the user's cache folder (``XDG_CACHE_HOME``, ~/.cache), and read
            there where the configuration, the arguments and the versions are the same; False, for neither.

    Raises:
        OptionError: an argument that cannot be used, with what was given and what is allowed.
        TypeError: model is none of the above.
    """
    asked, failed = locals(), None  # all arguments, before anything else is a local: they may go to another process
    is_early = device == "cuda" and "torch" not in sys.modules and fake_cuda.is_possible()
    if is_early and (request := _pickled(plan, asked)) is not None:
        try:
            return fake_cuda.call(request)  # which imports torch; this process need not
        except RuntimeError as error:
            failed = error
    from . import cache as plan_cache
    from .models import resolve, shared_by

    limit = parse_memory(memory)
    if device not in DEFAULTS:
        raise not_allowed("device", device, "cuda or cpu")
    _check_numbers(batch_size=batch_size, devices=devices, tensor_parallel=tensor_parallel)
    if not NOT_NEGATIVE.holds(clip):
        raise not_allowed("clip", clip, NOT_NEGATIVE.words)
    given = _given(techniques, devices, tensor_parallel)
    speeds = _speeds(hardware or default(device), link)
    on_host = None if host_memory is None else parse_memory(host_memory, "host_memory")
    source = resolve(model, seq_len, inputs, loss, dropout, attention_mask)
    if tensor_parallel > 1:
        source = shared_by(source, tensor_parallel)
    arguments: dict[str, Any] = {
        "source": source, "memory": limit, "device": device, "given": given, "batch_size": batch_size,
        "clip": clip, "hardware": speeds, "host_memory": on_host, "devices": devices,
    }  # fmt: skip
    expected = _counted_on(device)
    if expected == ON_CPU_TENSORS:
        _warn_of_cpu_tensors()
    key = plan_cache.key(source, arguments, expected) if cache else None
    found = plan_cache.load(key) if key is not None else None
    if found is None:
        found = _plan_or_fall_back(expected, arguments, failed)
        if key is not None and found.counted_on == expected:
            plan_cache.store(key, found)
    return found


def _speeds(hardware: Hardware, link: str | None) -> Hardware:
    if link is None:
        return hardware
    if link not in LINKS:
        raise not_allowed("link", link, ", ".join(LINKS))
    return dataclasses.replace(hardware, link=LINKS[link])


def _warn_of_cpu_tensors() -> None:
    why = "this torch is for GPUs and finds none" if fake_cuda.torch_has_gpus() else "no C++ compiler is found"
    warnings.warn(f"memkern.plan counts on fake CPU tensors, with a wider band: {why}", stacklevel=3)


def _counted_on(device: str) -> str:
    """The fake tensors for a device: a GPU's where torch has one, or where there is a compiler for fake CUDA."""
    import torch

    if device == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() or fake_cuda.is_possible() else ON_CPU_TENSORS


def _check_numbers(**numbers: Any) -> None:
    whole = at_least(1)
    for name, value in numbers.items():
        if not whole.holds(value):
            raise not_allowed(name, value, whole.words)


def _given(techniques: Any, devices: int, tensor_parallel: int) -> dict[str, Any]:
    """The techniques that are given, and those that several devices leave as they are."""
    given = dataclasses.asdict(techniques) if isinstance(techniques, Techniques) else dict(techniques or {})
    _check_given(given)
    if devices > 1 and tensor_parallel > 1:
        raise not_allowed("tensor_parallel", tensor_parallel, "1 with devices above 1: both together are not counted")
    if max(devices, tensor_parallel) > 1:
        return _sharded(given, "devices" if devices > 1 else "tensor_parallel")
    return given


def _check_given(given: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(Techniques)]
    for name in given:
        if name not in names:
            raise not_allowed("techniques", name, ", ".join(names))
    # Checks the values. What others of them need is the planner's choice if it is not given.
    needed: dict[str, Any] = {"precision": "bf16"} if given.get("master_weights") else {}
    needed |= {"compile": True} if given.get("saved_bits") and "compile" not in given else {}
    needed |= (
        {"checkpointing": "blocks"} if given.get("checkpoint_bits") or given.get("checkpoint_every", 1) != 1 else {}
    )
    Techniques(**needed | dict(given))


def _sharded(given: Mapping[str, Any], by: str) -> dict[str, Any]:
    """What is given, and the techniques that are not counted with shards as they are. by: the argument for those."""
    for name, plain in UNSHARDED.items():
        if given.get(name, plain) != plain:
            raise not_allowed(name, given[name], f"{plain!r} with {by} above 1")
    if given.get("optimizer") == "muon":
        raise not_allowed("optimizer", "muon", f"one whose step needs no other device's shards, with {by} above 1")
    if by == "tensor_parallel" and given.get("linear_share") is not None:
        raise not_allowed("linear_share", given["linear_share"], f"None with {by} above 1")
    return UNSHARDED | dict(given)


def _pickled(function: Callable[..., Plan], arguments: dict[str, Any]) -> bytes | None:
    """A request for :func:`fake_cuda.call`; None for arguments that cannot be sent to another process."""
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps((function, arguments))
    return None


def _plan_or_fall_back(counted_on: str, arguments: dict[str, Any], failed: RuntimeError | None) -> Plan:
    """Plans here, or in a process with fake CUDA; where that fails on fake CPU tensors, with a warning.

    failed: the error of such a process, which would raise it again.
    """
    import torch

    if counted_on != "cuda" or torch.cuda.is_available():
        return _plan_in_session(counted_on=counted_on, **arguments)
    why: Any = failed
    if failed is None:
        request = _pickled(_plan_in_session, {"counted_on": counted_on, **arguments})
        try:
            if request is not None:
                return fake_cuda.call(request)
            why = "the model cannot be sent to a process with fake CUDA tensors (pickle)"
        except RuntimeError as error:
            why = error
    warnings.warn(f"memkern.plan counts on fake CPU tensors, with a wider band: {why}", stacklevel=3)
    return _plan_in_session(counted_on=ON_CPU_TENSORS, **arguments)


def _alone(predictor: Predictor, rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Each technique's prediction, and the errors of those that the model does not run with."""
    alone: dict[str, Prediction] = {}
    ruled_out: dict[str, str] = {}
    for name, changes in rows.items():
        if "loss_chunk" in changes and not predictor.source.is_language_model:
            continue
        if {"offload", "weights_on_host"} & changes.keys() and predictor.device == "cpu":
            continue
        is_counted = not UNSHARDED.keys() & changes.keys()
        is_parallel = getattr(predictor.source, "tensor_parallel", 1) > 1
        if (predictor.devices > 1 or is_parallel) and not is_counted:
            continue
        if is_parallel and "linear_share" in changes:
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


def _plan_in_session(**arguments: Any) -> Plan:
    if not arguments["given"].get("compile"):
        return _predict_and_choose(**arguments)
    from .graphs import session

    with session():
        return _predict_and_choose(**arguments)


def _predict_and_choose(
    *,
    source: Any,
    memory: int,
    device: str,
    counted_on: str,
    given: dict[str, Any],
    batch_size: int,
    clip: float,
    hardware: Hardware,
    host_memory: int | None,
    devices: int = 1,
) -> Plan:
    predictor = Predictor(source, device, counted_on, hardware, devices)
    chooser = Chooser(predictor, given, batch_size, clip, host_memory)
    alone, ruled_out = _alone(predictor, ALONE | (COMPILED if given.get("compile") else {}))
    limit = int(memory / (1 + BAND[counted_on][0]))
    best = chooser.fastest(limit)
    plain = predictor.predict(Techniques(micro_batch=batch_size))
    largest = 0
    if best is not None:
        largest = chooser.largest_micro_batch(best.techniques, limit)
        if best.techniques.accumulation > 1 and "micro_batch" not in given:
            micro = max(size for size in range(1, largest + 1) if batch_size % size == 0)
            more = best.techniques.replace(micro_batch=micro, accumulation=batch_size // micro)
            best = predictor.predict(more)
    shared = getattr(source, "tensor_parallel", 1)
    whole = predictor
    if shared > 1:
        whole = Predictor(dataclasses.replace(source, tensor_parallel=1), device, counted_on, hardware)
    asked = Asked(predictor, given, batch_size, clip, hardware, host_memory)
    return Plan(
        model=source.name,
        parameters=whole.fixed(Techniques()).count,
        device=device,
        seq_len=source.tokens,
        memory=memory,
        alone=alone,
        together=chooser.smallest(),
        recommended=best,
        largest_micro_batch=largest,
        counted_on=counted_on,
        changes=() if best else tuple(would_fit(asked, memory)),
        fits_as_it_is=plain.peak <= limit,
        loss=source.loss_code,
        host_memory=host_memory,
        link=hardware.link,
        ways={} if device == "cpu" or plain.peak <= limit else chooser.fastest_of_each(limit),
        ruled_out=ruled_out,
        devices=devices,
        tensor_parallel=shared,
    )
