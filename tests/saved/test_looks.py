"""Readers of a node's saved tensors beside the node itself, or more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern

from .helpers import WIDTH


def _compare(forward: Callable[[], Tensor], inputs: list[Tensor], bits: Any) -> None:
    """Gradients without and with what is saved in ``bits``."""
    plain = torch.autograd.grad(forward(), inputs)
    with memkern.quantize_saved(bits):
        loss = forward()
    for a, b in zip(plain, torch.autograd.grad(loss, inputs), strict=True):
        assert (a - b).norm() <= (1e-6 if bits == "exact" else 0.03) * b.norm()


def _weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(WIDTH, WIDTH, generator=generator) / 8).requires_grad_() for _ in range(2)]


def _hook_on_the_result(h: Tensor, seen: list[Tensor]) -> None:
    h.register_hook(lambda grad, node=h.grad_fn: seen.append(node._saved_result.clone()))


def _hook_before_the_node(h: Tensor, seen: list[Tensor]) -> None:
    node = h.grad_fn
    node.register_prehook(lambda grads: seen.append(node._saved_result.clone()))


def _hook_after_the_node(h: Tensor, seen: list[Tensor]) -> None:
    node = h.grad_fn
    node.register_hook(lambda *grads: seen.append(node._saved_result.clone()))


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("register", [_hook_on_the_result, _hook_before_the_node, _hook_after_the_node])
def test_hooks_that_look_at_what_a_node_has_saved(register: Callable[..., None], bits: Any) -> None:
    w, v = _weights()
    x = torch.randn(WIDTH, WIDTH)
    results = []
    for mode in (None, bits):
        seen: list[Tensor] = []

        def forward() -> Tensor:
            h = torch.tanh(x @ w)
            register(h, seen)  # noqa: B023
            return (torch.tanh(h @ v) @ v).square().sum()

        if mode is None:
            loss = forward()
        else:
            with memkern.quantize_saved(mode):
                loss = forward()
        results.append((*torch.autograd.grad(loss, [w, v]), *seen))
    assert len(results[0]) == 3
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= (1e-6 if bits == "exact" else 0.02) * b.norm()


def test_a_second_backward_pass_still_raises() -> None:
    w, v = _weights()
    with memkern.quantize_saved(8):
        loss = (torch.tanh(torch.randn(WIDTH, WIDTH) @ w) @ v).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


DERIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "softmax": lambda h: h.softmax(-1),
    "leaky relu": lambda h: torch.nn.functional.leaky_relu(h + 1),
}


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", DERIVED)
def test_a_metric_s_tensor_may_change_in_place(name: str, bits: Any) -> None:
    """torch keeps the function's result, and what the metric has saved is never asked for."""
    w, v = _weights()
    x, kept = torch.randn(WIDTH, WIDTH), []

    def forward() -> Tensor:
        h = x @ w
        kept.append(h.norm())
        y = DERIVED[name](h)
        h.add_(1.0)
        return (y @ v).square().sum()

    _compare(forward, [w, v], bits)


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": Tensor.t,
    "gathered": lambda x: x[torch.arange(WIDTH).flip(0)],
    "copied": Tensor.clone,
    "cast": lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
    "sliced": lambda x: torch.cat((x[1:], x[:1])),
}


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", STEPS)
def test_long_chains_of_views_and_copies(name: str, bits: Any) -> None:
    w, v = _weights()
    start = torch.randn(WIDTH, WIDTH)

    def forward() -> Tensor:
        x, total = start @ w, torch.zeros(())
        for _ in range(400):
            x = STEPS[name](x)
            total = total + (x.float() @ v).sum()
        return total

    _compare(forward, [w, v], bits)
