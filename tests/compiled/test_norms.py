"""Batch, instance and group norms compiled with 8 bits: their normalized inputs are saved as codes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.partitioned import backend, relative_error, step

CHANNELS, SIZE = 32, 16


def _conv(norm: nn.Module, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), norm, activation)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "batch without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "batch without weights": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "group": lambda: nn.GroupNorm(4, CHANNELS),
    "group without weights": lambda: nn.GroupNorm(4, CHANNELS, affine=False),
    "one group": lambda: nn.GroupNorm(1, CHANNELS),
}


def net(norm: str, activation: Callable[[], nn.Module] = nn.SiLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_conv(NORMS[norm](), activation()) for _ in range(3)), nn.Conv2d(CHANNELS, 8, 1))


def run(model: nn.Module, x: Tensor, bits: int | str | None, autocast: bool = False) -> tuple[int, Tensor]:
    """The bytes that a step saves, and the gradients."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend(bits))

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(x).float().square().mean()

    return step(model, x, loss)


def batch(memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    x = torch.randn(4, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return x.to(memory_format=memory_format)


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_of_norms_are_saved_in_codes(norm: str) -> None:
    x = batch()
    exact, expected = run(net(norm), x, "exact")
    coded, actual = run(net(norm), x, 8)
    assert coded < 0.36 * exact  # codes and their scales take 0.26 of fp32 numbers
    assert 1e-4 < relative_error(actual, expected) < 0.02


@pytest.mark.full
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Identity], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_inputs_of_norms_before_other_activations_are_saved_in_codes(norm: str, activation: type[nn.Module]) -> None:
    x = batch()
    exact, expected = run(net(norm, activation), x, "exact")
    coded, actual = run(net(norm, activation), x, 8)
    assert coded < 0.55 * exact
    assert relative_error(actual, expected) < 0.02


@pytest.mark.full
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_other_precisions_and_layouts_save_codes_too(norm: str) -> None:
    for dtype, memory_format, autocast in (
        (torch.float32, torch.channels_last, False),
        (torch.float32, torch.contiguous_format, True),
        (torch.bfloat16, torch.contiguous_format, False),
    ):
        x = batch(memory_format).to(dtype)
        exact_net, coded_net = (net(norm).to(dtype=dtype, memory_format=memory_format) for _ in range(2))
        exact, expected = run(exact_net, x, "exact", autocast)
        coded, actual = run(coded_net, x, 8, autocast)
        assert coded < 0.75 * exact
        assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_a_mean_far_from_zero_does_no_harm(norm: str) -> None:
    """Codes are of the normalized input: those of x itself would be off by a share of its mean."""

    def shifted() -> nn.Sequential:
        model = net(norm)
        for block in model[:-1]:
            block[0].bias = nn.Parameter(torch.full((CHANNELS,), 100.0))
        return model

    x = batch()
    (_, expected), (_, actual) = run(shifted(), x, "exact"), run(shifted(), x, 8)
    assert relative_error(actual, expected) < 0.02


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
