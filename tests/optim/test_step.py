"""A step takes gradients of any layout and many tensors in one op, without temporaries, and autograd sees it."""

import pytest
import torch

from memkern import memory
from tests.support.helpers import (
    Calls,
    assert_same,
    give_gradients,
    hard,
    make_params,
    needs_cpp,
    on,
    over_8bit,
    over_cpu,
    over_kinds,
    snapshot,
    train,
)

# ---- gradients and tensors

GRADIENT_LAYOUTS = {
    "transposed": lambda g: g.t().contiguous().t(),
    "every other": lambda g: torch.stack([g, g], -1)[..., 0],
    "expanded": lambda g: g[:1].expand_as(g),
    "channels_last": lambda g: g,
}


@pytest.mark.pairwise
@over_kinds
@over_cpu
@pytest.mark.parametrize("norm", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_gradients_may_have_other_strides_than_their_parameter(
    layout: str, norm: float | None, backend: str, build: type
) -> None:
    shape = (8, 16, 8, 8) if layout == "channels_last" else (64, 128)
    (p,), (q,) = make_params([shape]), make_params([shape])
    if layout == "channels_last":
        for x in (p, q):
            x.data = x.data.contiguous(memory_format=torch.channels_last)
    a, b = build([p], max_grad_norm=norm), build([q], max_grad_norm=norm)
    for step in range(2):
        g = GRADIENT_LAYOUTS[layout](hard(shape, seed=step))
        p.grad = g
        q.grad = torch.empty_like(q).copy_(g)
        assert g.stride() != q.grad.stride()
        with on(backend):
            a.step()
            b.step()
        assert p.grad is g
    assert_same(snapshot(a), snapshot(b))
    assert p.stride() == q.stride()


# ---- autograd and memory


@over_kinds
@over_cpu
def test_autograd_sees_that_parameters_changed(backend: str, build: type) -> None:
    params = make_params()
    optimizer = build(params)
    versions = [p._version for p in params]
    loss = sum((p * p).sum() for p in params)  # saves p
    with on(backend):
        train(optimizer, 1)
    assert all(p._version > version for p, version in zip(params, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_cpp
@over_kinds
def test_a_step_is_one_op(build: type) -> None:
    params = make_params([(64, 128), (300, 7), (10,), (4, 5000)])
    optimizer = build(params, lr=1e-2)
    with Calls() as first:
        train(optimizer, 1)
    give_gradients(params, 1)
    optimizer.param_groups[0]["lr"] = 5e-3
    with Calls() as later:
        optimizer.step()
    op = f"memkern::{optimizer.op.name}"
    assert later.names.count(op) == 1  # one call, whatever the number of tensors
    assert {n for n in later.names if not n.startswith("profiler::")} <= {op, "aten::fill_"}
    assert first.names.count(op) == 1


@over_8bit
def test_a_step_makes_no_temporary_as_large_as_a_parameter(build: type) -> None:
    params = make_params([(256, 1024), (64, 128)])
    optimizer = build(params)
    give_gradients(params, 0)
    peak_at_rest = memory.peak_bytes(lambda: None, params, [p.grad for p in params])
    peak = memory.peak_bytes(optimizer.step, params, [p.grad for p in params])  # the first step makes states
    # A copy of the larger parameter would take about 2 to 4 times the bytes of the states.
    assert peak - peak_at_rest < 1.1 * memory.optimizer_bytes(optimizer)
    held = (params, [p.grad for p in params], optimizer)
    assert memory.peak_bytes(optimizer.step, *held) == memory.peak_bytes(lambda: None, *held)
