"""Batch, instance and group norms compiled with 8 bits: their normalized inputs are saved as codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.partitioned import backend, relative_error, step

CHANNELS, SIZE = 32, 16


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "batch without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "batch without weights": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "group": lambda: nn.GroupNorm(4, CHANNELS),
    "group without weights": lambda: nn.GroupNorm(4, CHANNELS, affine=False),
    "one group": lambda: nn.GroupNorm(1, CHANNELS),
}


def net(norm: str, activation: Callable[[], nn.Module] = nn.SiLU, mean: float = 0.0) -> nn.Sequential:
    """Convolutions with a norm and an activation after each. mean: of what is normalized."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        nn.init.constant_(conv.bias, mean)  # type: ignore[arg-type]
        layers += [conv, NORMS[norm](), activation()]
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS, 8, 1))


def run(model: nn.Module, x: Tensor, bits: int | str | None, autocast: bool = False) -> tuple[int, Tensor]:
    """The bytes that a step saves, and the gradients."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend(bits))

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(x).float().square().mean()

    return step(model, x, loss)


def batch() -> Tensor:
    return torch.randn(4, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


class Case(NamedTuple):
    """A net and its step; share: the largest of the bytes that "exact" saves."""

    norm: str
    share: float = 0.36  # codes and their scales take 0.26 of fp32 numbers
    activation: type[nn.Module] = nn.SiLU
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    autocast: bool = False
    mean: float = 100.0  # codes of the norm's input itself would be off by a share of its mean


CASES = {
    **{norm: Case(norm) for norm in NORMS},
    "batch, relu": Case("batch", 0.55, nn.ReLU),
    "group, gelu": Case("group", 0.55, nn.GELU),
    "batch, identity": Case("batch", 0.55, nn.Identity),
    "batch, channels last": Case("batch", 0.75, memory_format=torch.channels_last),
    "instance, autocast": Case("instance", 0.75, autocast=True, mean=0.0),  # bf16 rounds 100 by 0.5
    "group, bf16": Case("group", 0.75, dtype=torch.bfloat16, mean=0.0),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in NORMS else pytest.mark.full) for n in CASES])
def test_inputs_of_norms_are_saved_in_codes(name: str) -> None:
    case = CASES[name]
    layout = {"dtype": case.dtype, "memory_format": case.memory_format}
    x = batch().to(**layout)
    (exact, expected), (coded, actual) = (
        run(net(case.norm, case.activation, case.mean).to(**layout), x, bits, case.autocast) for bits in ("exact", 8)
    )
    assert coded < case.share * exact
    assert 1e-4 < relative_error(actual, expected) < (0.02 if case.mean else 0.03)


class OutlierTokens(nn.Module):
    """A layer norm of tokens of which every twentieth is 1,000 times as large as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(16, 128), nn.LayerNorm(128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.ones(1280, 1).index_fill(0, torch.arange(0, 1280, 20), 1000.0)
        return self.after(self.norm(self.before(x) * sizes))


def groups_far_from_zero() -> nn.Module:
    """A group norm of values whose mean is some 80 of their standard deviations."""
    conv = nn.Conv2d(8, CHANNELS, 1)
    nn.init.constant_(conv.bias, 50.0)  # type: ignore[arg-type]
    return nn.Sequential(conv, nn.GroupNorm(16, CHANNELS), nn.SiLU(), nn.Conv2d(CHANNELS, 8, 1))


def dead_channels() -> nn.Module:
    """A batch norm of channels of which every tenth is constant, with a deviation of 0.003 by the norm's eps."""
    linear = nn.Linear(16, 1100)
    with torch.no_grad():
        linear.weight[::10] = 0.0
    return nn.Sequential(linear, nn.BatchNorm1d(1100), nn.SiLU(), nn.Linear(1100, 16))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(OutlierTokens, (1280, 16)), (groups_far_from_zero, (64, 8, 9, 9)), (dead_channels, (32, 16))],
)
def test_means_and_deviations_are_exact(make: Callable[[], nn.Module], shape: tuple[int, ...], dynamic: bool) -> None:
    """Each of the three norms has more than the 1,024 means and deviations from which on values would be coded."""
    torch.manual_seed(0)
    model, values = make(), torch.randn(shape)
    weight = next(model.parameters())
    runs = []
    for bits in ("exact", 8):
        torch._dynamo.reset()
        x = values.clone().requires_grad_()
        loss = torch.compile(model, backend=backend(bits), dynamic=dynamic)(x).square().mean()
        runs.append(torch.autograd.grad(loss, (x, weight)))
    for exact, coded in zip(*runs, strict=True):  # by example, and by channel
        error = (coded - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert error.max() < 0.025


@pytest.mark.full
def test_a_norm_in_evaluation_saves_codes_and_updates_statistics_as_torchs() -> None:
    """A frozen norm (eval) takes the running statistics; in training it updates them to torch's."""
    x = batch()
    frozen, coded_net, plain = net("batch"), net("batch"), net("batch")
    for model in (frozen, coded_net):
        model(x)
        model.eval()
    exact, expected = run(frozen, x, "exact")
    coded, actual = run(coded_net, x, 8)
    assert coded < 0.5 * exact
    assert relative_error(actual, expected) < 0.02
    run(frozen.train(), x, 8)
    plain(x)
    plain(x)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(frozen.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_norm_of_the_graphs_input_saves_it_once() -> None:
    """The input of a graph is in memory anyway: codes of it would come on top."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(4, CHANNELS), nn.Conv2d(CHANNELS, 8, 1))
    x = batch()
    saved, _ = run(model, x, 8)
    assert saved < x.nbytes
