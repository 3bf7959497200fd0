"""Traces torch's OpInfo samples, cuts their graphs with memkern's partitioner and compares gradients (no Inductor)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memkern.compiled import codable, partitioner
from tests.support.partitioned import Traced, compiled

SPARSE = ("to_sparse", "sparse.mm.reduce", "sparse.sampled_addmm")
EXCLUDED = {
    **dict.fromkeys(SPARSE, "sparse results: torch aborts as it traces"),
    "linalg.eig": "a loss of eigenvectors, which are unique up to a phase only",
    **dict.fromkeys((f"polygamma.polygamma_n_{n}" for n in range(5)), "torch has no functional form of polygamma_"),
    "narrow": "a beginning that is a tensor: torch's graph calls where() with a number",
}
"""Operations of which no graph is cut, by their name and variant, with the reason."""
RANDOM = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal",
    "rrelu",
    "fractional_max_pool",
    "multi_head_attention",
)
"""Parts of the names of operations that draw random numbers, which graphs draw in another order than eager torch."""
OFF_FROM_EAGER = {
    "nn.functional.soft_margin_loss": "torch's own graph subtracts from 1: a gradient of 6e-7 is off by .14"
}
"""Operations for which torch's own compiled graph is off from eager torch, too, with the reason."""
_CANCELLING = 0.1, "a sum of few values, which cancel"
BOUNDS_IN_8_BITS = dict.fromkeys(
    ("kron", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _CANCELLING
)
"""Operations whose gradients may be off by more than 3 % in 8 bits: by how much, and why."""
WITHOUT_A_GRAPH = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Raised where a size or a branch depends on the tensors' values: no graph is traced."""


def infos() -> dict[str, Any]:
    """The operations that have a derivative in fp32, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    by_name = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {
        name: op
        for name, op in by_name.items()
        if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu") and name not in EXCLUDED
    }


def _product(x: Tensor) -> Tensor:
    """x / 2 + x / 2 by a matrix product: of two columns, as torch computes one column elementwise."""
    columns = torch.stack((x.reshape(-1), x.reshape(-1)), 1) @ torch.full((2, 2), 0.5, dtype=x.dtype)
    return columns[:, 0].reshape(x.shape)


def _loss_of(call: Callable[..., Any], spec: Any, values: list[Any], positions: list[int]) -> Callable[..., Tensor]:
    """The weighted sum of a call's results as a function of its tensors, each of which passes a matrix product first.

    The graph must therefore save the tensors that the operation uses, in codes where memkern's tables allow it.
    spec and values: the call's arguments, flattened; positions: of the tensors among them.
    """

    def loss(*tensors: Tensor) -> Tensor:
        leaves = list(values)
        for i, x in zip(positions, tensors, strict=True):
            leaves[i] = _product(x) if x.requires_grad else x
        args, kwargs = tree_unflatten(leaves, spec)
        total = torch.zeros(())
        for y in tree_leaves(call(*args, **kwargs)):
            if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()) and y.numel():
                y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
                weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
                total = total + (y * weights).sum()
        return total

    return loss


def faults_of(name: str, call: Callable[..., Any], sample: Any) -> str:
    """The faults of a sample's gradients in one line; "" for none."""
    is_near_eager = not any(part in name for part in RANDOM) and name not in OFF_FROM_EAGER
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    inputs = [leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in positions]
    loss = _loss_of(call, spec, leaves, positions)
    torch.manual_seed(0)
    tracked = [x for x in inputs if x.requires_grad]
    try:
        value = loss(*inputs)
    except RuntimeError:  # an operation in place that has another dtype
        return ""
    if not tracked or not value.requires_grad:
        return ""
    eager = torch.autograd.grad(value, tracked, allow_unused=True)
    try:
        plain, exact, coded = _gradients_of_cuts(loss, inputs)
    except WITHOUT_A_GRAPH:
        return ""
    faults = []
    bound = BOUNDS_IN_8_BITS.get(name, (0.03, ""))[0]
    # g_*: the gradient of x by eager torch, by torch's own cut, by "exact" and by 8 bits
    for x, g_eager, g_torch, g_exact, g_coded in zip(tracked, eager, plain, exact, coded, strict=True):
        if not (g_exact.isnan() & g_torch.isnan() | (g_exact == g_torch)).all():
            faults.append(f"exact is off from torch's own cut by {_off(g_exact, g_torch):.1e}")
        if is_near_eager and (error := _off(g_exact, torch.zeros_like(x) if g_eager is None else g_eager)) > 1e-4:
            faults.append(f"exact is off from eager by {error:.1e}")
        if (error := _off(g_coded, g_torch)) > bound:
            faults.append(f"8 bits are off by {error:.1e}")
    return "; ".join(dict.fromkeys(faults))


def _gradients_of_cuts(loss: Callable[..., Tensor], inputs: list[Tensor]) -> list[list[Tensor]]:
    """The gradients of the graph as torch cuts it, and as memkern does: "exact" and with 8 bits."""
    traced = Traced(loss, inputs)

    def gradients(bits: Any) -> list[Tensor]:
        torch.manual_seed(0)
        try:
            pairs = [*zip(inputs, traced.gradients(bits), strict=True)]
        except TypeError:  # a graph that writes inputs, or has tokens of effects: AOTAutograd calls it
            torch.manual_seed(0)
            copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
            compiled(bits, loss)(*copies).backward()
            pairs = [(x, x.grad) for x in copies]
        return [torch.zeros_like(x) if g is None else g for x, g in pairs if x.requires_grad]

    return [gradients(bits) for bits in (None, "exact", 8)]


def _off(actual: Tensor, expected: Tensor) -> float:
    """The relative error (2-norm) of the finite elements; inf where one tensor is finite and the other is not."""
    finite = expected.isfinite()
    if not finite.equal(actual.isfinite()):
        return float("inf")
    difference = (actual - expected)[finite].abs().double().norm()
    return float(difference / expected[finite].abs().double().norm().clamp_min(1e-12)) if difference else 0.0


def failures(name: str) -> Iterator[str]:
    """The faults of an operation's first sample, out of place and in place; yields nothing where there are none."""
    op = infos()[name]
    for call in filter(None, (op.get_op(), op.get_inplace())):
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
        sample = next((s for s in samples if isinstance(s.input, Tensor) and s.input.numel()), None)
        is_in_place = call is op.get_inplace()
        if sample is None or (is_in_place and (sample.broadcasts_input or not op.supports_inplace_autograd)):
            continue
        if faults := faults_of(name, call, sample):
            yield f"{name}{', in place' if is_in_place else ''}: {faults}"


def all_coded() -> Any:
    """Two patches under which values of any size are coded, as OpInfo's samples are smaller than MIN_NUMEL."""
    from unittest import mock

    return mock.patch.multiple(codable, MIN_NUMEL=1), mock.patch.multiple(partitioner, MIN_NUMEL=1)
