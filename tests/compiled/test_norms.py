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
