"""Memory that others free, exchange or fill again between forward and backward pass: torch's gradients, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern

from .helpers import ERRORS, WIDTH, error, gradients, network


class Emptied:
    """Frees a module's weights as FSDP2 does: in the storage, behind the version counter."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [(p, p.detach().clone()) for p in module.parameters()]
        module.register_forward_pre_hook(self.fill)
        module.register_forward_hook(self.empty)
        module.register_full_backward_pre_hook(self.fill)
        self.empty()

    def fill(self, *_: Any) -> None:
        for p, value in self.parameters:
            p.untyped_storage().resize_(value.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
                p.copy_(value)

    def empty(self, *_: Any) -> None:
        for p, _value in self.parameters:
            p.untyped_storage().resize_(0)


class Exchanged:
    """Exchanges a module's weights as offloading does: ``.data`` is the host's copy outside of the module's call."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [(p, p.data) for p in module.parameters()]
        module.register_forward_pre_hook(self.bring)
        module.register_forward_hook(self.take)
        module.register_full_backward_pre_hook(self.bring)

    def bring(self, *_: Any) -> None:
        for p, host in self.parameters:
            p.data = host.clone()

    def take(self, *_: Any) -> None:
        for p, host in self.parameters:
            p.data = torch.full_like(host, torch.nan)  # who reads it now gets the wrong values


@pytest.mark.parametrize("manage", [Emptied, Exchanged])
@pytest.mark.parametrize("bits", [8, "exact"])
def test_weights_that_are_there_only_while_their_module_runs(bits: Any, manage: Callable[..., Any]) -> None:
    net, x = network()
    expected = gradients(net, lambda: net(x))
    for block in net:
        manage(block)
    memkern.compress(net, saved_bits=bits, activations=None)
    assert error(gradients(net, lambda: net(x)), expected) < ERRORS[bits]


@pytest.mark.parametrize("bits", [8, "exact"])
def test_weights_that_are_replaced_after_the_forward_pass(bits: Any) -> None:
    """By ``.data``, which changes no version: what was made of the old weights is not made of the new ones."""

    def after(context: Any) -> dict[str, Tensor]:
        net, x = network()
        with context or torch.enable_grad():
            y = net(x).square().mean()
        for p in (net[1].shift, net[2].norm.bias):
            p.data = torch.full_like(p, 1e3)
        y.backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    assert error(after(memkern.quantize_saved(bits)), after(None)) < ERRORS[bits]


def _free(p: Tensor) -> None:
    p.untyped_storage().resize_(0)


def _shorten(p: Tensor) -> None:
    p.untyped_storage().resize_(p.nbytes // 2)


def _replace(p: Tensor) -> None:
    p.data = torch.empty(0)


@pytest.mark.parametrize("harm", [_free, _shorten, _replace])
@pytest.mark.parametrize("bits", [8, "exact"])
def test_weights_that_are_gone(bits: Any, harm: Callable[[Tensor], None]) -> None:
    """And stay so: an error that says what happened, or the gradients, where the backward pass needs no weight."""
    raised = {}
    for name in ("1.norm.weight", "1.norm.bias", "1.shift"):
        net, x = network()
        expected = gradients(net, lambda net=net, x=x: net(x))
        net.zero_grad()
        memkern.compress(net, saved_bits=bits, activations=None)
        y = net(x).square().mean()
        harm(net.get_parameter(name))
        try:
            y.backward()
        except RuntimeError as one:
            raised[name] = str(one)
        else:
            found = {each: p.grad for each, p in net.named_parameters() if p.grad is not None}
            assert error(found, expected) < ERRORS[bits]
    message = "its .data is now (0,)" if harm is _replace else "lost its memory"
    assert all(message in each for each in raised.values())
    assert "1.norm.weight" in raised  # layer_norm has saved it
    assert ("1.shift" in raised) == (harm is not _replace)  # what is made of it needs the old memory alone


@pytest.mark.parametrize("bits", [8, "exact"])
def test_activations_that_are_gone(bits: Any) -> None:
    """Pipeline stages free what they have sent on: in codes it is there, else the backward pass says so."""
    torch.manual_seed(0)
    first, second, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(96, WIDTH)
    second(first(x)).square().mean().backward()
    expected, first.weight.grad, second.weight.grad = second.weight.grad, None, None
    with memkern.quantize_saved(bits):
        h = first(x)
        loss = second(h).square().mean()
        h.untyped_storage().resize_(0)
    if bits == "exact":
        with pytest.raises(RuntimeError, match="lost its memory"):
            loss.backward()
    else:
        loss.backward()
        assert second.weight.grad is not None
        assert error({"": second.weight.grad}, {"": expected}) < ERRORS[bits]
