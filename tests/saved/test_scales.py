"""Norms whose rows or channels have several scales: no block of codes mixes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern

from .test_bounds import MOST, N, W, off


def _rms_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-20)


def _rms_of_squares(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-20)


ROW_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-20),
    "by hand": _rms_by_hand,
    "by hand, x * x": _rms_of_squares,
    "heads": lambda x: _rms_by_hand(x.view(N, 2, -1)).flatten(1),
    "heads, transposed": lambda x: _rms_by_hand(x.view(N, 2, -1).transpose(0, 1)).transpose(0, 1).flatten(1),
    "after a product": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-20) + (x @ torch.ones(x.shape[1], 1)) * 1e-3,
    "layer_norm of rows that are columns in memory": lambda x: F.layer_norm(x.t(), (N,), eps=1e-20).t(),
}


@pytest.mark.parametrize("name", ROW_NORMS)
@pytest.mark.parametrize("width", [32, 64, 20, 96, 192])
def test_norms_of_short_rows(name: str, width: int) -> None:
    """Rows over 6 decades, each of them as important as the others after the norm."""
    if "heads" in name and width == 20:
        width = 40
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, W, generator=generator)
    scales = 10 ** (-6 * torch.rand(N, 1, generator=generator))
    w, v = (torch.randn(each, width, generator=generator).div_(8).requires_grad_() for each in (W, width))
    columns = 10 ** (-6 * torch.rand(width, generator=generator)) if "columns" in name else torch.ones(())

    def forward() -> Tensor:
        h = (x * scales) @ w if "columns" not in name else x @ (w * columns)
        return (ROW_NORMS[name](h) @ v).square().mean()

    assert max(off(forward, [w, v])) < MOST


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(64, affine=False), nn.GroupNorm(4, 64, affine=False)])
def test_norms_of_channels_of_several_scales(memory_format: torch.memory_format, norm: nn.Module) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    after = nn.Conv2d(64, 8, 3, bias=False)
    with torch.no_grad():
        conv.weight[:16].mul_(1e4)
    for each in (conv, after):
        each.to(memory_format=memory_format)
    x = torch.randn(4, 3, 16, 16).to(memory_format=memory_format)

    def forward() -> Tensor:
        return after(norm(conv(x)).relu()).square().mean()

    expected = torch.autograd.grad(forward(), conv.weight)[0]
    with memkern.quantize_saved(8):
        loss = forward()
    actual = torch.autograd.grad(loss, conv.weight)[0]
    errors = (actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert errors.max() < 2 * MOST  # of single channels
