"""Edits that people make of weights and of groups between steps, for tests/support/training_loops.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


def _mask(p: Tensor, seed: int) -> Tensor:
    return (torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) < 0.5).to(p.dtype)


def _random(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)


def _data(p: Tensor, x: Tensor) -> None:
    p.data = x


def _in_place(name: str, *args: Any) -> Any:
    def edit(p: Tensor, seed: int) -> None:
        with torch.no_grad():
            getattr(p, name)(*args)

    return edit


def _masked(p: Tensor, seed: int) -> None:
    with torch.no_grad():
        p.mul_(_mask(p, seed))


def _noisy(p: Tensor, seed: int) -> None:
    with torch.no_grad():
        p.add_(_random(p, seed), alpha=0.1)


def _vector(p: nn.Parameter, seed: int) -> None:
    p.data = p.data.contiguous()  # torch's function makes views
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) * 0.9, [p])


def _partly(p: Tensor, seed: int) -> None:
    p.data[..., : max(p.shape[-1] // 2, 1)] = 0.25


# name: (weight, seed) -> None
VALUES: dict[str, Any] = {
    "mul_": _in_place("mul_", 0.5),
    "zero_": _in_place("zero_"),
    "clamp_": _in_place("clamp_", -0.5, 0.5),
    "mask": _masked,
    "noise": _noisy,
    "new values": lambda p, seed: nn.init.normal_(p, std=0.3),
    ".data.mul_": lambda p, seed: p.data.mul_(0.75),
    ".data.copy_": lambda p, seed: p.data.copy_(_random(p, seed)),
    ".data = masked": lambda p, seed: _data(p, p.data * _mask(p, seed)),
    ".data[...] =": _partly,
    "vector_to_parameters": _vector,
}
"""Edits that change the values, by name."""


def _gaps(p: Tensor) -> None:
    wide = torch.empty(*p.shape[:-1], 2 * p.shape[-1], dtype=p.dtype)
    _data(p, wide[..., ::2].copy_(p.data))


def _offset(p: Tensor) -> None:
    """Moves a weight into a larger buffer, at an offset, as wrappers that flatten weights do."""
    buffer = torch.zeros(p.numel() + 3, dtype=p.dtype)
    _data(p, buffer[3:].view(p.shape).copy_(p.data))


def _swapped(p: nn.Parameter) -> None:
    p.grad = None
    other = nn.Parameter(p.detach().clone())
    with contextlib.suppress(RuntimeError):  # a graph still holds one of them
        torch.utils.swap_tensors(p, other)


# name: (weight) -> None
STORAGE: dict[str, Any] = {
    "clone": lambda p: _data(p, p.data.clone()),
    "contiguous": lambda p: _data(p, p.data.clone(memory_format=torch.contiguous_format)),
    "transposed": lambda p: _data(p, p.data.transpose(0, -1).contiguous().transpose(0, -1)),
    "channels_last": lambda p: _data(
        p, p.data.contiguous(memory_format=torch.channels_last if p.dim() == 4 else torch.contiguous_format)
    ),
    "gaps": _gaps,
    "offset": _offset,
    "swap_tensors": _swapped,
}
"""Edits that keep the values, by name."""

OPTIONS: list[tuple[str, Any]] = [
    ("lr", 1e-3),
    ("lr", 3e-2),
    ("lr", 0.0),
    ("weight_decay", 0.1),
    ("weight_decay", 0.0),
    ("betas", (0.8, 0.99)),
    ("betas", (0.9, 0.999)),
    ("momentum", 0.5),
    ("maximize", True),
    ("maximize", False),
    ("codec", "dynamic"),
    ("codec", "power"),
    ("block_size", 64),
    ("block_size", 136),
    ("state_bits", 8),
    ("state_bits", 32),
    ("min_8bit_size", 0),
    ("min_8bit_size", 4096),
]
"""Options of a group, and values for them."""
