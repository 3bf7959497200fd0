"""memkern.compile(activations=bits): graphs save codes of an activation's derivative in place of its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from tests.support.partitioned import backend, relative_error, step

ROWS, WIDTH, WIDE = 128, 64, 256
# torch's module, and memkern's that saves the same codes in eager mode
ACTIVATIONS: dict[str, tuple[nn.Module, nn.Module]] = {
    "gelu": (nn.GELU(), memkern.nn.GELU(bits=3)),
    "gelu by tanh": (nn.GELU("tanh"), memkern.nn.GELU("tanh", bits=3)),
    "silu": (nn.SiLU(), memkern.nn.SiLU(bits=3)),
    "mish": (nn.Mish(), memkern.nn.Mish(bits=3)),
    "hardswish": (nn.Hardswish(), memkern.nn.Hardswish(bits=3)),
    "log-sigmoid": (nn.LogSigmoid(), memkern.nn.LogSigmoid(bits=3)),
}
NAMES = [pytest.param(name, marks=() if name == "gelu" else pytest.mark.full) for name in ACTIVATIONS]
CODE_BYTES = ROWS * WIDE * 3 // 8  # of 3 bits an element


class MLP(nn.Module):
    """Two linear layers around an activation; the second saves its input only where it is trained."""

    def __init__(self, activation: nn.Module, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.activation, self.down = nn.Linear(WIDTH, WIDE), activation, nn.Linear(WIDE, WIDTH)
        self.down.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def compiled(model: nn.Module, bits: Any, activations: int | None = None) -> Any:
    """A model whose graphs memkern cuts, run without Inductor's code generation."""
    torch._dynamo.reset()
    return torch.compile(model, backend=backend(bits, activations=activations))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_saved_before_a_frozen_layer(name: str, bits: Any, dtype: torch.dtype) -> None:
    """The compiled graph saves codes alone and has the gradient of memkern's module."""
    activation, ours = ACTIVATIONS[name]
    x = torch.randn(ROWS, WIDTH, dtype=dtype)
    model, module = MLP(activation).to(dtype), MLP(ours).to(dtype)
    saved, gradient = step(model, x, compiled(model, bits, 3))
    assert saved == CODE_BYTES
    _, expected = step(module, x)
    torch.testing.assert_close(gradient, expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-7)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_codes_are_saved_where_the_input_is_needed(name: str, bits: Any) -> None:
    """A trained layer after the activation needs its output, which is computed again from its input."""
    x = torch.randn(ROWS, WIDTH)
    steps = []
    for activations in (None, 1):
        model = MLP(ACTIVATIONS[name][0], trained=True)
        steps.append(step(model, x, compiled(model, bits, activations)))
    (saved, gradient), (saved_with_codes, gradient_with_codes) = steps
    assert saved == saved_with_codes
    assert torch.equal(gradient, gradient_with_codes)


def test_no_codes_are_saved_of_an_input_that_is_returned() -> None:
    class Both(MLP):
        def forward(self, x: Tensor) -> Any:
            h = self.up(x)
            return self.down(self.activation(h)), h

    x, gradients = torch.randn(ROWS, WIDTH), []
    for activations in (None, 3):
        model = Both(nn.GELU())
        call = compiled(model, "exact", activations)
        gradients.append(step(model, x, lambda x, call=call: call(x)[0])[1])
    assert torch.equal(*gradients)  # no codes were made


def test_activations_in_a_row_and_of_one_input_have_near_gradients() -> None:
    class Two(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(nn.functional.gelu(nn.functional.silu(h)) + nn.functional.mish(h))

    x = torch.randn(ROWS, WIDTH)
    gradients = []
    for activations in (None, 4):
        model = Two(nn.Identity())
        gradients.append(step(model, x, compiled(model, "exact", activations))[1])
    assert relative_error(gradients[1], gradients[0]) < 0.05


@pytest.mark.full
def test_gradients_are_those_of_memkerns_module_through_inductor_with_changing_sizes() -> None:
    model, module = MLP(nn.GELU()), MLP(memkern.nn.GELU(bits=3))
    call = memkern.compile(model, activations=3, dynamic=True)
    for rows in (ROWS, 2 * ROWS, 3 * ROWS):
        x = torch.randn(rows, WIDTH)
        (_, actual), (_, expected) = step(model, x, call), step(module, x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_cast_of_both_passes_is_not_saved_in_fp32() -> None:
    """Both passes cast Hardswish's bf16 input, and torch makes one cast of the two: 8 bits save no more than exact."""
    x, saved = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16), []
    for bits in ("exact", 8):
        model = MLP(nn.Hardswish()).bfloat16()
        saved.append(step(model, x, compiled(model, bits))[0])
    assert saved[1] <= saved[0]
