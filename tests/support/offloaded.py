"""For the tests of HostOffload: its modes, a small model, a training loop, the log of a step's copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from memkern import optim
from memkern.optim import HostOffload
from tests.support.helpers import OPTIMIZERS, snapshot
from tests.support.late_transfers import LateHostOffload, LateTransfers

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "offload_gradients": {"offload_gradients": True},
}
"""Options of HostOffload with steps on the CPU."""
ON_DEVICE: dict[str, dict[str, Any]] = {
    "device": {"step_on": "device"},
    "device, in backward": {"step_on": "device", "step_in_backward": True},
}
"""Options of HostOffload with steps on the device."""
over_modes = pytest.mark.parametrize("mode", MODES)
over_transfers = pytest.mark.parametrize("wrapper", [HostOffload, LateHostOffload], ids=["cpu", "late"])
TORCH_CLASSES = [torch.optim.AdamW, torch.optim.SGD]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 5, bias=False)).to(dtype)


def losses(model: nn.Module, count: int) -> list[Tensor]:
    """Losses of ``count`` random batches, with their graphs."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    return [model(torch.randn(8, 16, generator=generator).to(dtype)).float().square().mean() for _ in range(count)]


def run(
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
) -> tuple[dict[str, Any], torch.optim.Optimizer, nn.Module]:
    """A user's training loop with a schedule. Returns a snapshot of the optimizer, the optimizer and the model."""
    model = model_of(dtype)
    optimizer = make(model.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(8, 16, generator=generator).to(dtype)
            (model(x).float().square().mean() / micro_batches).backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return snapshot(optimizer), optimizer, model


def events_of_a_step(options: dict[str, Any], log: list[Any]) -> list[Any]:
    """The third step's entries of LateTransfers' log, for three matrices, copies numbered from 0.

    ``options``: HostOffload's. ``log``: an empty list, to which the entries of all steps are written.
    """

    class Logged(HostOffload):
        _transfers_of = staticmethod(lambda device: LateTransfers(device, log))

    layers = [nn.Linear(20, 20, bias=False) for _ in range(3)]
    optimizer = Logged(optim.AdamW, [layer.weight for layer in layers], **options)
    for _ in range(3):
        log.clear()
        nn.Sequential(*layers)(torch.randn(2, 20)).sum().backward()
        log.append("backward is over")
        optimizer.step()
        log.append("step is over")
        optimizer.zero_grad()
    first = {direction: min(e[1] for e in log if e[0] == direction) for direction in ("down", "up")}

    def renumbered(entry: Any) -> Any:
        if isinstance(entry, str):
            return entry
        kind, number = entry
        return (kind, number - first[kind]) if kind in first else (kind, *renumbered(number))

    return [*map(renumbered, log)]


def options_of(build: type) -> dict[str, Any]:
    return {"lr": 1e-2, "weight_decay": 0.1, **({"min_8bit_size": 0} if build in OPTIMIZERS else {})}
