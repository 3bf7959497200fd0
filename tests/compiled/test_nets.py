"""Parts of image nets, and language models, compiled with 8 bits: saved bytes and gradient errors stay below bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.helpers import first_full
from tests.support.partitioned import backend, relative_error, step


class Gated(nn.Module):
    """Squeeze and excitation: a number in [0, 1] for each channel, whose rows share blocks of codes."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.norm, self.gate = nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), gate
        self.squeeze, self.after = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.before(x)))
        return self.after(y * self.gate(self.squeeze(y.mean((2, 3), keepdim=True))))


class Scaled(nn.Module):
    """ConvNeXt's layer scale: a learned factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)
        self.scale = nn.Parameter(torch.rand(64, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * self.scale)


class Up(nn.Module):
    """A UNet's step up: an upsampled branch and a skip connection, concatenated for a group norm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip = nn.Conv2d(16, 32, 1), nn.Conv2d(16, 32, 3, padding=1)
        self.smooth = nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.inner, self.shortcut = (
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.Conv2d(64, 32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(F.silu(self.first(x)), 2)
        large = self.smooth(F.interpolate(small, scale_factor=2.0, mode="nearest"))
        y = torch.cat((large, self.skip(x)), 1)
        return self.inner(F.silu(self.norm(y))) + self.shortcut(y)


def _step(net: nn.Module) -> tuple[int, int, float]:
    """The bytes that are saved in 8 bits, those that eager torch saves, and the gradients' error."""
    x = torch.randn(2, 16, 14, 14, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    eager, expected = step(net, x)
    coded, actual = step(net, x, torch.compile(net, backend=backend(8)))
    return coded, eager, relative_error(actual, expected)


@pytest.mark.parametrize(
    ("make", "largest_share"),
    [
        (lambda: Gated(torch.sigmoid), 0.2),
        (lambda: Gated(F.hardsigmoid), 0.2),
        (Scaled, 0.35),
        (Up, 0.2),
    ],
    ids=["sigmoid", "hardsigmoid", "scale", "up"],
)
def test_saved_bytes_and_gradient_errors_stay_below_bounds(make: Callable[[], nn.Module], largest_share: float) -> None:
    torch.manual_seed(0)
    coded, eager, error = _step(make())
    assert coded / eager < largest_share
    assert error < 0.03


ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.Hardtanh)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda cls: cls.__name__)
def test_activations_in_place_save_as_much_as_others(activation: Any) -> None:
    saved = []
    for inplace in (False, True):
        torch.manual_seed(0)
        first, last = nn.Conv2d(16, 64, 1, bias=False), nn.Conv2d(64, 16, 1)
        coded, _, error = _step(nn.Sequential(first, nn.BatchNorm2d(64), activation(inplace=inplace), last))
        assert error < 0.03
        saved.append(coded)
    assert saved[0] == saved[1]


# ---- models of transformers

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
# The largest share of eager torch's saved bytes. In GPT-NeoX two norms have one input, and one product makes q, k, v.
# Qwen3 normalizes queries and keys by heads, which share blocks of codes here, and stay exact.
SHARES = {"GPTNeoX": 0.15, "Gemma2": 0.27, "Llama": 0.14, "Phi": 0.13, "Qwen3": 0.19}


@pytest.mark.full
@pytest.mark.parametrize("name", first_full(SHARES, 2))
def test_language_models_stay_below_bounds(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"head_dim": 32, "num_key_value_heads": 2} if name in ("Gemma2", "Qwen3") else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **heads))
    tokens = torch.randint(0, 300, (2, 128), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    (eager, expected), (coded, actual) = (
        step(model, tokens, lambda x, call=call: call(input_ids=x, labels=x, use_cache=False).loss)
        for call in (model, torch.compile(model, backend=backend(8)))
    )
    assert coded / eager < SHARES[name]
    assert relative_error(actual, expected) < 0.02
