"""Operations that are seen after what they come to was stored in codes, and that ask for it exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern.saved.peek import saved_by

SMALL = torch.full((64, 1), 1e-3)
"""What divides by it needs exact values, and saves nothing that is to be decided."""


def _is_coded(y: Tensor) -> bool:
    """Whether what SiLU has saved is in codes."""
    values = saved_by(y.grad_fn, "_saved_self")
    assert values
    return values[0].lossy


def _silu(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """SiLU's input and output, after a product that allows codes of the input."""
    h = layer(torch.ones(64, 64, requires_grad=True))
    y = F.silu(h)
    layer(y)
    assert _is_coded(y)
    return h, y


@pytest.mark.parametrize("waiting", ["nothing", "a tensor", "a freed tensor"])
@pytest.mark.parametrize("later", [8, "exact"])
def test_exactly_whatever_else_waits(waiting: str, later: object) -> None:
    layer = nn.Linear(64, 64)
    with memkern.quantize_saved(8):
        h, y = _silu(layer)
        kept = torch.sin(layer(h)) if waiting != "nothing" else None
        if waiting == "a freed tensor":
            del kept
        with memkern.quantize_saved(later):
            layer(y / SMALL)
        assert not _is_coded(y)


def test_what_a_freed_branch_has_stored_is_not_there_any_more() -> None:
    """The norm of a large mean is then the first user of its input, and has codes of its own."""
    layer = nn.Linear(64, 64)
    with memkern.quantize_saved(8):
        h = layer(torch.ones(64, 64)) + 100
        branch = layer(h)
        y = F.layer_norm(h, (64,))
        del branch
        layer(y)
        values = saved_by(y.grad_fn, "_saved_input")
        assert values
        assert values[0].lossy


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self) -> tuple[Tensor, Tensor]:
        return _silu(self.layer)


class _Second(_First):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(y / SMALL)


def test_no_codes_again_at_the_next_module_s_end() -> None:
    """What the first module returns is held exactly at its end, and in codes again at the second one's."""
    first, second = _First(), _Second()
    for module in (first, second):
        memkern.compress(module, saved_bits=8)
    h, y = first()
    assert not _is_coded(y)
    second(h, y)
    assert not _is_coded(y)
    h, y = first()
    memkern.restore(second)
    memkern.compress(second.layer, saved_bits=8)
    second.layer(h)
    assert _is_coded(y)  # nothing asks for it exactly
