"""torch's samples of its operations through the partitioner: traced and cut, run without Inductor.

``python -m tests.compiled.opinfo [name ...]`` runs those of some operations, or all, and prints what is wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memkern.compiled import codable, partitioner
from tests.support.partitioned import Traced

EXCLUDED: dict[str, str] = {}
"""Operations that no graph can be traced of, by their full name, with the reason."""
WITHOUT_A_GRAPH = (DataDependentOutputException, DynamicOutputShapeException)


def infos() -> dict[str, Any]:
    """The operations that have a derivative in fp32, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {
        name: op
        for name, op in found.items()
        if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu") and name not in EXCLUDED
    }


def _loss_of(call: Callable[..., Any], spec: Any, given: list[Any], places: list[int]) -> Callable[..., Tensor]:
    """Of all tensors of a sample, a sum of all results with random weights; each floating input is a product before."""

    def loss(*tensors: Tensor) -> Tensor:
        leaves = list(given)
        for i, x in zip(places, tensors, strict=True):
            leaves[i] = x * torch.ones_like(x) if x.requires_grad else x
        args, kwargs = tree_unflatten(leaves, spec)
        total = torch.zeros(())
        for y in tree_leaves(call(*args, **kwargs)):
            if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()) and y.numel():
                y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
                weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
                total = total + (y * weights).sum()
        return total

    return loss


def outcome(call: Callable[..., Any], sample: Any, is_random: bool) -> str:
    """What is wrong with a sample's gradients; "" for nothing."""
    given, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
    inputs = [given[i].detach().clone().requires_grad_(given[i].requires_grad) for i in places]
    loss = _loss_of(call, spec, given, places)
    torch.manual_seed(0)
    of = [x for x in inputs if x.requires_grad]
    value = loss(*inputs)
    if not of or not value.requires_grad:
        return ""
    eager = torch.autograd.grad(value, of, allow_unused=True)
    try:
        traced = Traced(loss, inputs)
    except WITHOUT_A_GRAPH:
        return ""

    def gradients(bits: Any) -> list[Tensor]:
        torch.manual_seed(0)
        found = zip(traced.inputs, traced.gradients(bits), strict=True)
        return [torch.zeros_like(x) if g is None else g for x, g in found if x.requires_grad]

    plain, exact, coded = (gradients(bits) for bits in (None, "exact", 8))
    wrong = []
    for x, e, p, g, c in zip(of, eager, plain, exact, coded, strict=True):
        if not g.equal(p) and not (g.isnan() & p.isnan() | (g == p)).all():
            wrong.append(f"exact is off from torch's own cut by {_off(g, p):.1e}")
        if not is_random and _off(g, torch.zeros_like(x) if e is None else e) > 1e-4:
            wrong.append(f"exact is off from eager by {_off(g, torch.zeros_like(x) if e is None else e):.1e}")
        if (by := _off(c, p)) > 0.03:
            wrong.append(f"8 bits are off by {by:.1e}")
    return "; ".join(dict.fromkeys(wrong))


def _off(found: Tensor, expected: Tensor) -> float:
    """Relative, of all that is finite; inf where one is finite and the other is not."""
    finite = expected.isfinite()
    if not finite.equal(found.isfinite()):
        return float("inf")
    difference = (found - expected)[finite].abs().double().norm()
    return float(difference / expected[finite].abs().double().norm().clamp_min(1e-12)) if difference else 0.0


def outcomes(name: str, samples: int) -> Iterator[str]:
    """Of some samples of an operation, out of place and in place."""
    op = infos()[name]
    is_random = not op.test_neg_view and "rand" in name or "dropout" in name
    for call in filter(None, (op.get_op(), op.get_inplace())):
        every = op.sample_inputs("cpu", torch.float32, requires_grad=True)
        every = [s for s in every if isinstance(s.input, Tensor) and s.input.numel()][:: max(1, 1)]
        for i, sample in enumerate(itertools.islice(every, samples)):
            if call is op.get_inplace() and (sample.broadcasts_input or not op.supports_inplace_autograd):
                continue
            if wrong := outcome(call, sample, is_random):
                yield f"{name}, sample {i}{', in place' if call is op.get_inplace() else ''}: {wrong}"


def all_coded() -> Any:
    """Patches the size from which values are coded, which few samples have."""
    from unittest import mock

    return mock.patch.multiple(codable, MIN_NUMEL=1), mock.patch.multiple(partitioner, MIN_NUMEL=1)


def main(names: list[str]) -> None:
    import time

    torch.set_num_threads(1)
    patches = all_coded()
    with patches[0], patches[1]:
        for name in names or infos():
            start = time.time()
            try:
                for wrong in outcomes(name, 2):
                    print(wrong, flush=True)
            except Exception as error:
                print(name, "RAISES", type(error).__name__, str(error).split("\n")[0][:200], flush=True)
            if time.time() - start > 3:
                print(name, f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
