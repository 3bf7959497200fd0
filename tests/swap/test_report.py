"""memkern.compress: modules that it leaves as they are and why, what its report says, and options that it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

import memkern
from memkern import memory
from memkern.blocks.block_lists import block_lists
from tests.support.swap_helpers import EVERY, MLP, CallsGelu

# ---- what is left as it is


class OwnForward(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class OwnLinear(nn.Linear):
    pass


def test_subclasses_are_left_alone() -> None:
    model = nn.Sequential(OwnForward(), OwnLinear(4, 4), nn.Linear(4, 4), nn.MultiheadAttention(4, 1))
    nn.utils.parametrizations.weight_norm(model[2])
    before = [type(m) for m in model.modules()]
    report = memkern.compress(model, linear=0.5, predicate=EVERY)
    assert [type(m) for m in model.modules()] == before
    assert {left.names[0] for left in report.left} == {"0", "1", "2", "3", "3.out_proj"}
    assert "0: OwnForward, a subclass of torch.nn.GELU may do more" in str(report)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_left_alone() -> None:
    scripted = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU())) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*scripted), nn.GELU())
    assert [swap.names for swap in memkern.compress(model).swapped] == [("1",)]
    assert not list(block_lists(model))
    assert model(torch.randn(3, 4)).shape == (3, 4)


def test_modules_with_a_replaced_forward_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.GELU()
    module.forward = lambda x: x  # as accelerate's hooks do
    assert "its forward is set on the instance" in str(memkern.compress(module))
    assert type(module) is nn.GELU
    monkeypatch.setattr(nn.GELU, "forward", lambda self, input: input)
    assert "its class's forward has been replaced" in str(memkern.compress(nn.GELU()))


class Decorated(CallsGelu):
    @functools.wraps(CallsGelu.forward)
    def forward(self, *args: Any) -> Tensor:
        return CallsGelu.forward(self, *args)


class Holds(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.activation_fn = function

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_fn(x)


class CallsInAHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)

    def first(self, x: Tensor) -> Tensor:
        return next(self.second(row) for row in x)

    def second(self, x: Tensor) -> Tensor:
        return F.mish(x) + self.first(x)


class HasAChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x)


# a module, and the function whose direct call is reported
CALLS: dict[str, tuple[nn.Module, str | None]] = {
    "calls": (CallsGelu(), "gelu"),
    "decorated": (Decorated(), "gelu"),
    "holds": (Holds(F.silu), "silu"),
    "holds a partial": (Holds(functools.partial(F.gelu, approximate="tanh")), "gelu"),
    "torch's layer": (nn.TransformerEncoderLayer(8, 1, activation="gelu"), "gelu"),
    "calls in a helper": (CallsInAHelper(), "mish"),
    "relu": (Holds(F.relu), None),
    "torch's with relu": (nn.TransformerEncoderLayer(8, 1), None),
    "child": (HasAChild(), None),
    "linear": (nn.Linear(3, 3), None),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_functions_are_reported(case: str) -> None:
    module, function = CALLS[case]
    report = memkern.compress(nn.Sequential(module))
    calls = [left.reason.split(" itself")[0] for left in report.left if left.what != "MultiheadAttention"]
    assert calls == ([f"calls {function}"] if function else [])


@pytest.mark.parametrize("build", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_activations_whose_output_is_kept_anyway_are_left_by_default(build: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), build(), nn.Linear(16, 16))
    x = torch.randn(100, 16)
    before = memory.saved_bytes(lambda: model(x))
    assert "torch saves its output" in str(memkern.compress(model))
    assert memory.saved_bytes(lambda: model(x)) == before
    memkern.compress(model, predicate=EVERY)
    assert memory.saved_bytes(lambda: model(x)) > before


NO_COUNTERPART = [
    *(nn.PReLU(), nn.RReLU(), nn.GLU(), nn.Softmax(-1), nn.LogSoftmax(-1)),
    *(nn.LSTM(4, 4), nn.GRU(4, 4), nn.MultiheadAttention(4, 1)),
]


@pytest.mark.parametrize("module", NO_COUNTERPART, ids=lambda module: type(module).__name__)
def test_what_has_no_counterpart_is_named(module: nn.Module) -> None:
    report = memkern.compress(nn.Sequential(nn.Linear(4, 4), module))
    assert f"  1: {type(module).__name__}, there is none that saves less; checkpoints and memkern.compile" in str(
        report
    )


class _Mixer(nn.Module):
    """Holds an activation that its fused kernel stands for, as transformers' Mamba does."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.activation, self.act, self.layer = "silu", nn.SiLU(), nn.Linear(4, 4)
        if calls:
            self.function = lambda x: self.act(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.silu(x))


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = _Mixer(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer.act(self.mixer(x))


def test_an_activation_that_nothing_calls_is_not_listed_as_swapped() -> None:
    report = memkern.compress(nn.Sequential(_Mixer(False)))
    assert not report.swapped
    assert "0.act: SiLU, no method of the model names it, so that nothing calls it" in str(report)
    assert len(memkern.compress(_Around()).swapped) == 1
    assert len(memkern.compress(_Mixer(False), predicate=EVERY).swapped) == 1


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_one_float64_tensor_does_not_refuse_a_float32_model(kind: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    clock = torch.zeros(3, dtype=torch.float64)
    if kind == "buffer":
        model[0].register_buffer("clock", clock)
    else:
        holder = nn.Module()
        holder.clock = nn.Parameter(clock)
        model.insert(0, holder)
        model.forward = lambda x: model[3](model[2](model[1](x)))
    x = torch.randn(64, 64)
    assert len(memkern.compress(model, 3).swapped) == 1
    saved = memory.saved_bytes(lambda: model(x), model)
    memkern.restore(model)
    assert saved < memory.saved_bytes(lambda: model(x), model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_frozen_float8_weights_are_not_the_models_dtype(dtype: torch.dtype) -> None:
    frozen = nn.Linear(64, 64).to(dtype).requires_grad_(False)
    for layers in ((frozen, nn.GELU(), nn.Linear(64, 64)), (frozen, nn.GELU())):
        (swap,) = memkern.compress(nn.Sequential(*layers)).swapped
        assert swap.before == 4


def of_float64() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


@pytest.mark.parametrize("activations", [3, "output"])
def test_float64_models_are_refused_before_anything_changes(activations: Any) -> None:
    net = of_float64()
    with pytest.raises(ValueError, match=f"activations must be None for a float64 model.*got {activations!r}"):
        memkern.compress(net, activations=activations, linear=0.5, embeddings=True)
    assert [type(m) for m in net] == [nn.Linear, nn.GELU, nn.Linear]


def test_what_float64_models_can_have() -> None:
    net, x = of_float64(), torch.randn(200, 8, dtype=torch.float64)
    expected = net(x)
    memkern.compress(net, None, linear={"share": 0.5, "min_tokens": 0})
    assert isinstance(net[0], memkern.nn.RandomizedLinear)
    actual = net(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


# ---- the report


@pytest.mark.parametrize(
    ("build", "width"),
    [
        (lambda: MLP(nn.GELU()), (64, "c_fc")),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 99)), (8, "0")),
        (lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 99)), None),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU()), None),
        (nn.GELU, None),
    ],
    ids=["beside", "in a row", "none before", "convolution", "alone"],
)
def test_the_width_that_the_structure_tells(build: Any, width: Any) -> None:
    report = memkern.compress(build())
    (swap,) = report.swapped
    assert swap.width == width
    assert report.bytes_per_token == (width[0] * (4 - 0.375) if width else 0)


def test_the_report_groups_layers_and_names_all_that_was_left() -> None:
    model = nn.Sequential(*(MLP(NewGELUActivation()) for _ in range(12)), nn.Embedding(3, 3), nn.GELU(), CallsGelu())
    shown = str(memkern.compress(model.bfloat16(), embeddings=True))
    few_bit = "GELU(approximate='tanh', bits=3, keep='codes')"
    saved = 64 * (8 - 0.375)
    assert (
        f"*.act (12 of them): NewGELUActivation -> {few_bit}, 8 -> 0.375 bytes per element, up to {saved:,.0f}" in shown
    )
    assert "13: GELU -> GELU(approximate='none', bits=3, keep='codes'), 2 -> 0.375 bytes per element\n" in shown
    assert f"per token: {12 * saved:,.0f} bytes" in shown
    assert "1 embeddings marked" in shown
    assert "14: CallsGelu, calls gelu itself" in shown
    assert str(memkern.compress(nn.Identity())) == "memkern.compress: 0 modules swapped"


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.GELU(), {"activations": 5}, ValueError, "bits"),
        (nn.GELU(), {"activations": 0}, ValueError, "bits"),
        (nn.GELU(), {"activations": "input"}, ValueError, "activations must be"),
        (nn.GELU(), {"kept": 1}, TypeError, "unexpected keyword argument 'kept'$"),
        (nn.GELU(), {"saved_bits": 8}, TypeError, "memkern.compile makes less; in eager mode, .*checkpoint_blocks"),
        (nn.GELU(), {"offload": True}, TypeError, "unexpected keyword argument 'offload': what a compiled model saves"),
        (nn.GELU(), {"linear": 0.0}, ValueError, "share must be above 0"),
        (nn.GELU(), {"linear": {"projection": "x"}}, ValueError, "projection must be one of"),
        (nn.GELU(), {"linear": {"colour": 1}}, TypeError, "colour"),
        ([nn.GELU()], {}, TypeError, "model must be a torch.nn.Module, got list"),
    ],
)
def test_bad_options_change_nothing(model: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memkern.compress(model, **options)
    if isinstance(model, nn.Module):
        assert type(model) is nn.GELU
