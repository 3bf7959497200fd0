"""Swaps by name are proved by the module's graph: a name and the values on some points prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern.swap import match, proof


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return quick(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return quick(x)


def gate_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(1.702 * x)
    return x * gate


def with_a_hook(x: Tensor) -> Tensor:
    y = quick(x)
    y.register_hook(lambda grad: 2 * grad)
    return y


def only_in_training(x: Tensor) -> Tensor:
    return quick(x) if torch.is_grad_enabled() else torch.zeros_like(x)


_seen: list[Tensor] = []


def watched(x: Tensor) -> Tensor:
    _seen.append(x.mean())
    return quick(x)


DIFFERENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "clamp at 10": lambda self, x: quick(x).clamp(max=10),
    "another branch": lambda self, x: torch.where(x > 10, torch.zeros_like(x), quick(x)),
    "a branch of Python": lambda self, x: quick(x) if x.max() < 10 else x,
    "noise in training": lambda self, x: quick(x) + torch.randn_like(x) if self.training else quick(x),
    "dropout": lambda self, x: F.dropout(quick(x), 0.5, self.training),
    "beta of the instance": lambda self, x: x * torch.sigmoid(self.beta * x),
    "beta of the class": lambda self, x: x * torch.sigmoid(self.gamma * x),
    "a gradient of its own": lambda self, x: OwnGradient.apply(x),
    "no gradient of the gate": lambda self, x: gate_without_gradient(x),
    "detached": lambda self, x: quick(x.detach()) + x * 0,
    "another autocast": lambda self, x: in_half(x),
    "a cast": lambda self, x: quick(x.double()).to(x.dtype),
    "in place": lambda self, x: x.mul_(torch.sigmoid(1.702 * x)),
    "a hook": lambda self, x: with_a_hook(x),
    "other values without gradients": lambda self, x: only_in_training(x),
    "an effect of its own": lambda self, x: watched(x),
    "another constant": lambda self, x: x * torch.sigmoid(1.7 * x),
    "an option": lambda self, x, scale=1.0: quick(x) * scale,
    "decorated": torch.no_grad()(lambda self, x: quick(x)),
}


def module_of(forward: Any, name: str = "QuickGELU") -> nn.Module:
    module = type(name, (nn.Module,), {"forward": forward, "gamma": 1.702})()
    module.beta = 1.702
    return module


@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}], ids=str)
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_not_proved_is_left_alone(case: str, options: dict[str, Any]) -> None:
    module = module_of(DIFFERENT[case])
    was = type(module)
    report = memkern.compress(module.eval(), **options)
    assert (type(module), report.swapped) == (was, ())
    if not options:
        assert "its name is known, and it does not compute what QuickGELU does" in str(report)


SAME: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "as written": lambda self, x: quick(x),
    "methods of tensors": lambda self, x: (1.702 * x).sigmoid().mul(x),
    "a method of its own": lambda self, x: self.own(x),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_proved_is_swapped(case: str) -> None:
    module = module_of(SAME[case])
    type(module).own = lambda self, x: quick(x)  # type: ignore[attr-defined]
    memkern.compress(module)
    assert type(module) is memkern.nn.QuickGELU


def test_classes_of_packages_and_their_subclasses() -> None:
    activations = pytest.importorskip("transformers.activations", reason="needs transformers")

    class Same(activations.GELUActivation):  # type: ignore[misc,name-defined]
        """Overrides nothing."""

    class Louder(activations.GELUActivation):  # type: ignore[misc,name-defined]
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Otherwise(activations.GELUActivation):  # type: ignore[misc,name-defined]
        def _gelu_python(self, input: Tensor) -> Tensor:
            return input

    Louder.__name__ = "GELUActivation"
    assert match.kind_of(Same, Same()) == "gelu"
    for cls in (Louder, Otherwise):
        assert match.kind_of(cls, cls(use_gelu_python=True)) is None
    changed = activations.GELUActivation()
    changed.act = torch.sin
    assert match.kind_of(type(changed), changed) is None


def test_a_forward_that_was_put_in_place_of_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: 2 * x)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * x)
    report = memkern.compress(net, linear=0.5)
    assert not report.swapped
    assert str(report).count("its class's forward has been replaced") == 2


def test_every_form_is_one_of_a_kind() -> None:
    forms = [form for kind in proof._FORMS for form in proof._forms(kind)]
    assert len({*map(repr, forms)}) == len(forms)
    x = torch.linspace(-8, 8, 97, dtype=torch.float64)
    for functions in proof._FORMS.values():
        values = [function(x) for function in functions]
        assert all(torch.allclose(each, values[0], rtol=1e-9, atol=1e-12) for each in values)
