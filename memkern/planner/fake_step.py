"""Runs a training step on fake tensors: traces of its forward and backward pass (:func:`traces`), and bytes of
parameters, gradients and optimizer states (:func:`static_bytes`)."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..blocks.block_lists import block_lists
from ..memory import LiveBytes
from ..nn.loss import is_plain_linear
from ..techniques.applying import apply, autocast, make_optimizer, optimizer_groups, weight_dtype
from ..techniques.options import Techniques
from .fake_mode import FakeMode
from .graphs import without_kernels
from .models import ConfiguredModel, Source
from .shards import group_bytes, output_layer, shard_bytes, shard_shape
from .trace import Trace, aligned, record
from .values import Values

FEW = 3  # blocks of a model that is traced in place of a deeper one: the first, the last and one between them


def chunked_loss(model: Any, batch: dict[str, Any], chunk: int) -> Tensor:
    """The loss of a causal language model with at most ``chunk`` classes' logits in memory."""
    from ..nn import LinearCrossEntropy

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.base_model(**inputs).last_hidden_state
    loss = LinearCrossEntropy.from_linear(model.get_output_embeddings(), chunk_size=chunk)
    return loss(hidden[:, :-1], batch["labels"][:, 1:])


def has_linear_head(source: Source) -> bool:
    """Whether a model's logits are its output layer's result for its last hidden states, as a loss in chunks assumes.

    Not so in models of masked tokens, which transform the hidden states first, and in models that scale or cap logits.
    """
    if isinstance(source, ConfiguredModel) and (source.depth or 0) > FEW:
        source = source.with_depth(FEW)
    mode = FakeMode()
    hidden: list[Tensor] = []  # last states of the model without its head, or of the decoder inside of it
    of_head: list[Tensor] = []

    def after_module(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(x := getattr(out, "last_hidden_state", None), Tensor):
            hidden.append(x)

    with contextlib.suppress(Exception), mode, torch.device("cpu"):  # the model's own code may raise anything
        mode.around = Values(mode).around
        model: Any = source.empty(torch.float32)
        head: Any = output_layer(model)
        if not is_plain_linear(head) or model.base_model is model:
            return False
        for module in model.base_model.modules():
            module.register_forward_hook(after_module)
        head.register_forward_hook(lambda module, args, out: of_head.extend((args[0], out)))
        batch: Any = source.batch(2)
        with torch.no_grad(), _as_on_real_tensors():
            logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
        taken, given = of_head
        return _is_same(given, logits) and any(_is_same(taken, x) for x in hidden)
    return False


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor is another one, or a view of all of it."""
    return x.shape == y.shape and x.untyped_storage()._cdata == y.untyped_storage()._cdata


def traces(source: Source, techniques: Techniques, device: str) -> tuple[list[Trace], int]:
    """The arguments ``traces`` and ``more_blocks`` of :func:`memkern.planner.trace.peaks`.

    A model whose blocks are alike is traced with few of them.
    """
    if isinstance(source, ConfiguredModel):
        # A model's own code may raise anything where its other sizes are for another depth. Then all blocks are traced.
        with contextlib.suppress(Exception):
            if (few := _trace_few_blocks(source, techniques, device)) is not None:
                return few
    return [trace(source, techniques, device)], 0


def _trace_few_blocks(source: ConfiguredModel, techniques: Techniques, device: str) -> tuple[list[Trace], int] | None:
    """Traces of two models with few blocks, the second with one more, where all blocks are alike.

    With a checkpoint around every n-th block, n blocks count as one.
    """
    depth, every = source.depth, techniques.checkpoint_every
    if depth is None or depth <= every * (FEW + 1):
        return None
    few = every * FEW + depth % every
    fewer, many = (trace(source.with_depth(n), techniques, device) for n in (few, few + every))
    return None if aligned(fewer, many) is None else ([fewer, many], (depth - few) // every)


def trace(source: Source, techniques: Techniques, device: str) -> Trace:
    """The trace of a forward and a backward pass on fake tensors."""
    mode = FakeMode()
    values = Values(mode)
    with mode, torch.device(device):
        model = source.empty(weight_dtype(techniques))
    apply(model, techniques)  # outside the mode: compress measures what activations save
    with mode, torch.device(device):
        mode.around = values.around
        batch = source.batch(techniques.micro_batch)
        for x in tree_leaves(batch):
            if isinstance(x, Tensor) and x.is_floating_point():
                values.forget(x)
        if techniques.precision == "bf16":
            batch = floats_to(batch, torch.bfloat16)

        def forward() -> Tensor:
            with autocast(techniques, device):
                if techniques.loss_chunk:
                    assert isinstance(batch, dict)
                    return chunked_loss(model, batch, techniques.loss_chunk)
                return source.loss(model, batch)

        with _as_on_real_tensors(), without_kernels(mode, model) if techniques.compile else contextlib.nullcontext():
            held = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
            lists = list(block_lists(model))
            return record(mode, model, held, forward, lists[0] if len(lists) == 1 else (), output_layer(model))


@contextlib.contextmanager
def _as_on_real_tensors() -> Iterator[None]:
    """A ``with`` block in which torch and transformers do with fake tensors what they do with real ones.

    Where transformers looks for packed sequences in the positions, which have no values, it finds none. The grouped
    product of matrices on fake tensors takes bf16 alone: other dtypes use transformers' own, which returns and saves
    the same.
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
        stack.enter_context(mock.patch.object(FakeTensor, "__format__", _format, create=True))
        # These checks read values
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        yield


def _format(x: Tensor, spec: str) -> str:
    """Formats a fake tensor of one number, as f-strings with the number of an expert do."""
    return format(x.item(), spec) if x.dim() == 0 else object.__format__(x, spec)


def floats_to(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its tensors of floats in another dtype."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


@dataclasses.dataclass(frozen=True)
class StaticBytes:
    """Bytes that do not depend on the batch, and two numbers of elements."""

    count: int  # elements of the model's parameters
    head: int  # and of its output layer's weight
    parameters: int
    errors: int  # rounding errors of bf16 weights
    gradients: int
    optimizer: int  # its states without these errors
    step_temporaries: int  # the most that an optimizer's step allocates
    largest_gradient: int
    # parameter groups: see memkern.planner.shards.group_bytes
    outside_blocks: int = 0
    block: int = 0
    embedding: int = 0
    output_layer: int = 0
    block_tensor: int = 0
    buffers: int = 0  # the model's, which hold no parameters
    pinned: int = 0  # all parameters, each in pinned memory of its own, which torch rounds up to a power of two

    @property
    def root_on_host(self) -> int:
        """The root's parameter group with weights on the host, where embedding and output layer are groups too."""
        return self.outside_blocks - self.embedding - self.output_layer


def static_bytes(source: Source, techniques: Techniques, device: str, *options: Any) -> StaticBytes:
    """Sizes of the parameters and of what the optimizer holds for them, from a step on fake tensors.

    options: of :func:`_static_bytes`.
    """
    depth = source.depth
    if isinstance(source, ConfiguredModel) and depth is not None and depth > FEW + 1:
        with contextlib.suppress(Exception):  # for the reason in traces()
            few, many = (
                dataclasses.astuple(_static_bytes(source.with_depth(n), techniques, device, *options))
                for n in (FEW, FEW + 1)
            )
            return StaticBytes(*(a + (depth - FEW) * (b - a) for a, b in zip(few, many, strict=True)))
    return _static_bytes(source, techniques, device, *options)


def _static_bytes(
    source: Source, techniques: Techniques, device: str, devices: int = 1, foreach: bool = False
) -> StaticBytes:
    """As :func:`static_bytes`, from a model with all its blocks.

    devices: how many share the model; sizes are of the first one's shards, which are the largest. foreach: whether
    torch's optimizers step all parameters together, as on a GPU.
    """
    with FakeMode(), torch.device(device):
        model = source.empty(weight_dtype(techniques))
        trained = [p for p in model.parameters() if p.requires_grad]
        parameter_bytes = _bytes([*model.parameters(), *model.buffers()])
        if devices > 1:
            parameter_bytes = shard_bytes(model.parameters(), devices) + _bytes(model.buffers())
            trained = [nn.Parameter(p.new_empty(shard_shape(p, devices))) for p in trained]
        head = getattr(output_layer(model), "weight", None)  # MusicGen has several heads
        is_muon = techniques.optimizer_class == "Muon"
        groups = optimizer_groups(model, techniques, lr=1e-3, weight_decay=0.0) if is_muon else trained
        errors, state, temporaries = _optimizer_bytes(trained, groups, techniques, foreach)
        gradients = [p.numel() * p.element_size() for p in trained]
        return StaticBytes(
            count=sum(p.numel() for p in model.parameters()),
            head=head.numel() if isinstance(head, Tensor) else 0,
            parameters=parameter_bytes,
            errors=errors,
            gradients=sum(gradients),
            optimizer=state,
            step_temporaries=temporaries,
            largest_gradient=max(gradients),
            **group_bytes(model, devices),
            buffers=_bytes(model.buffers()),
            pinned=sum(1 << (p.numel() * p.element_size() - 1).bit_length() for p in model.parameters()),
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def _optimizer_bytes(
    params: list[nn.Parameter], groups: Sequence[Any], techniques: Techniques, foreach: bool
) -> tuple[int, int, int]:
    """Bytes of the weights' errors and of the other states, and the most that a step allocates beside them."""
    options = {"foreach": False} if techniques.is_torch else {}
    optimizer = make_optimizer(groups, techniques.replace(step_in_backward=False, offload=None), **options)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    gradients = [p.grad for p in params if p.grad is not None]
    live = LiveBytes([*params, *gradients, *_states(optimizer)], counted=False)
    with live:
        optimizer.step()
    peak = live.peak
    errors = _bytes(state["weight_error"] for state in optimizer.state.values() if "weight_error" in state)
    states = _bytes(_states(optimizer)) - errors
    if techniques.is_torch and foreach:
        # torch's foreach steps hold the square roots of all second moments at once.
        peak = max(peak, sum(p.numel() * p.element_size() for p in params))
    return errors, states, peak


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
