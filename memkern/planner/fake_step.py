"""A training step of a model with given techniques, run on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..applying import apply, autocast, make_optimizer, optimizer_groups, weight_dtype
from ..memory import LiveBytes
from ..options import Techniques, not_allowed
from ..saved.offload import fake_bytes_on_host
from .models import Configured, Source
from .trace import Trace, aligned, record

FEW = 3  # blocks of which traces are made: the first, the last and one between them
ERRORS = ("weight_error", "master_weight")
"""Entries of an optimizer's state that belong to the weights."""


def chunked_loss(model: Any, batch: dict[str, Any], chunk: int) -> Tensor:
    """The loss of a causal language model with at most ``chunk`` classes' logits in memory."""
    from ..nn import LinearCrossEntropy

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.base_model(**inputs).last_hidden_state
    loss = LinearCrossEntropy.from_linear(model.get_output_embeddings(), chunk_size=chunk)
    return loss(hidden[:, :-1], batch["labels"][:, 1:])


def traces(source: Source, techniques: Techniques, device: str) -> tuple[list[Trace], int]:
    """Traces for :func:`memkern.planner.trace.peaks`: for a model with like blocks two, with few of them."""
    if techniques.loss_chunk and not source.is_language_model:
        raise not_allowed("loss_chunk", techniques.loss_chunk, "None for a model that is no language model")
    depth = source.depth
    # Groups of sqrt(L) blocks are not alike: the last is smaller. The order in which tensors leave the device, but for
    # inputs of checkpoints, depends on all blocks.
    if (
        not isinstance(source, Configured)
        or depth is None
        or depth <= FEW + 1
        or techniques.checkpointing == "sqrt"
        or (techniques.offload_saved and not techniques.checkpointing)
    ):
        return [trace(source, techniques, device)], 0
    few, many = (trace(source.with_depth(n), techniques, device) for n in (FEW, FEW + 1))
    if aligned(few, many) is None:
        return [trace(source, techniques, device)], 0
    return [few, many], depth - FEW


def trace(source: Source, techniques: Techniques, device: str) -> Trace:
    """A forward and a backward pass on fake tensors of a device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device(device):
        model = source.empty(weight_dtype(techniques))
    apply(model, techniques)  # outside the mode: compress measures what activations save
    with mode, torch.device(device):
        batch = source.batch(techniques.micro_batch)
        if techniques.precision == "bf16":
            batch = floats_to(batch, torch.bfloat16)

        def forward() -> Tensor:
            with autocast(techniques, device):
                if techniques.loss_chunk:
                    assert isinstance(batch, dict)
                    return chunked_loss(model, batch, techniques.loss_chunk)
                return source.loss(model, batch)

        with _as_on_real_tensors(), _Values():
            found = record(model, [x for x in tree_leaves(batch) if isinstance(x, Tensor)], forward)
    return dataclasses.replace(found, left=fake_bytes_on_host(mode))


class _Values(TorchDispatchMode):
    """What models ask of values, which fake tensors do not have.

    "Any" is false and "all" is true: no position is masked, no label out of range. A selection selects all, which needs
    the most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._true = weakref.WeakValueDictionary[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return self._true.get(id(args[0])) is args[0]
        if func in (aten.all.default, aten.all.dim, aten.all.dims):
            out = func(*args, **kwargs or {})
            self._true[id(out)] = out
            return out
        if func is aten.nonzero.default:
            return _all_of(args[0])
        if func is aten.masked_select.default:
            return torch.broadcast_tensors(*args)[0].reshape(-1).clone()
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):
            indices = [j for i in args[1] for j in (_all_of(i).unbind(1) if _is_mask(i) else (i,))]
            return func(args[0], indices)
        if func is aten.index_put_.default and any(map(_is_mask, args[1])):
            return args[0]
        if func is aten._ctc_loss.Tensor:
            log_probs, targets = args[:2]
            frames, size = log_probs.shape[:2]
            states = 2 * (targets.numel() // size) + 1
            return log_probs.new_zeros(size), log_probs.new_zeros(size, frames, states)
        if func is aten._ctc_loss_backward.Tensor:
            return torch.zeros_like(args[1])
        return func(*args, **kwargs or {})


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _all_of(mask: Tensor) -> Tensor:
    """As many indices as a mask has elements."""
    return torch.zeros(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)


@contextlib.contextmanager
def _as_on_real_tensors() -> Iterator[None]:
    """What transformers does with real tensors, where it looks at values or where fake ones know less.

    Positions of packed sequences cannot be looked at: attention is masked as for one sequence. The fake grouped product
    of matrices takes bf16 alone: other dtypes use transformers' own operator, which returns and saves the same.
    """
    masks, experts = (sys.modules.get(f"transformers.{n}") for n in ("masking_utils", "integrations.moe"))
    with contextlib.ExitStack() as stack:
        if hasattr(masks, "find_packed_sequence_indices"):
            patch = mock.patch.object(masks, "find_packed_sequence_indices", return_value=None)
            stack.enter_context(patch)
        if hasattr(experts, "_can_use_grouped_mm"):

            def is_bf16(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
                return weight.dtype == torch.bfloat16

            stack.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", is_bf16))
        # Checks of values, which raise unless all are true
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        yield


def floats_to(batch: Any, dtype: torch.dtype) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Bytes that do not depend on the batch, and numbers of parameters."""

    count: int
    head: int
    parameters: int
    errors: int
    gradients: int
    optimizer: int
    step_temporaries: int
    largest: int
    """Bytes of the largest gradient."""


def fixed(source: Source, techniques: Techniques, device: str) -> Fixed:
    """Sizes of the parameters and of what the optimizer holds for them, from a step on fake tensors."""
    depth = source.depth
    if not isinstance(source, Configured) or depth is None or depth <= FEW + 1:
        return _fixed(source, techniques, device)
    few, many = (
        dataclasses.astuple(_fixed(source.with_depth(n), techniques, device)) for n in (FEW, FEW + 1)
    )
    return Fixed(*(a + (depth - FEW) * (b - a) for a, b in zip(few, many, strict=True)))


def _fixed(source: Source, techniques: Techniques, device: str) -> Fixed:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device(device):
        model = source.empty(weight_dtype(techniques))
        trained = [p for p in model.parameters() if p.requires_grad]
        muon = techniques.optimizer_class == "Muon"
        groups = optimizer_groups(model, techniques, lr=1e-3, weight_decay=0.0) if muon else trained
        errors, state, temporaries = _optimizer_bytes(trained, groups, techniques)
        gradients = [p.numel() * p.element_size() for p in trained]
        return Fixed(
            count=sum(p.numel() for p in model.parameters()),
            head=_head(model),
            parameters=_bytes([*model.parameters(), *model.buffers()]),
            errors=errors,
            gradients=sum(gradients),
            optimizer=state,
            step_temporaries=temporaries,
            largest=max(gradients),
        )


def _head(model: Any) -> int:
    """Parameters of a language model's output layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)  # MusicGen has several heads
    return weight.numel() if isinstance(weight, Tensor) else 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def _optimizer_bytes(
    params: list[nn.Parameter], groups: Sequence[Any], techniques: Techniques
) -> tuple[int, int, int]:
    """Bytes of the weights' errors and of the other states, and the most that a step allocates beside them."""
    options = {"foreach": False} if techniques.is_torch else {}
    optimizer = make_optimizer(groups, techniques.replace(step_in_backward=False, offload=False), **options)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    gradients = [p.grad for p in params if p.grad is not None]
    live = LiveBytes([*params, *gradients, *_states(optimizer)], counted=False)
    with live:
        optimizer.step()
    peak = live.peak
    errors = _bytes(state[key] for state in optimizer.state.values() for key in ERRORS if key in state)
    states = _bytes(_states(optimizer)) - errors
    if techniques.is_torch and params[0].device.type == "cuda":
        peak = max(
            peak, sum(p.numel() * p.element_size() for p in params)
        )  # foreach allocates the root of every second moment
    return errors, states, peak


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
