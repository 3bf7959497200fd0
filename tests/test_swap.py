"""memkern.compress and restore: what changes, what must not, what is left alone, and what is saved."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import gpt2
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern import memory
from memkern import nn as mnn

TORCH: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "GELU": (nn.GELU, mnn.GELU),
    "tanh GELU": (lambda: nn.GELU("tanh"), mnn.GELU),
    "SiLU": (nn.SiLU, mnn.SiLU),
    "SiLU in place": (lambda: nn.SiLU(inplace=True), mnn.SiLU),
    "Mish": (nn.Mish, mnn.Mish),
    "Hardswish": (nn.Hardswish, mnn.Hardswish),
    "Softplus": (lambda: nn.Softplus(2.0, 10.0), mnn.Softplus),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), mnn.LeakyReLU),
    "Hardtanh": (lambda: nn.Hardtanh(-2.0, 0.5), mnn.Hardtanh),
    "ReLU6": (nn.ReLU6, mnn.Hardtanh),
    "ReLU": (nn.ReLU, mnn.ReLU),
    "Tanh": (nn.Tanh, mnn.Tanh),
    "Sigmoid": (nn.Sigmoid, mnn.Sigmoid),
}
EVERY = lambda name, module: True  # noqa: E731


class MLP(nn.Module):
    """Linear, activation, linear, under transformers' names."""

    def __init__(self, act: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


def named(name: str, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of a class with that name."""
    return type(name, (nn.Module,), {"forward": lambda self, input: function(input)})()


def contents(module: nn.Module) -> dict[str, Any]:
    return {key: copy.copy(value) for key, value in vars(module).items()}


# Activations


@pytest.mark.parametrize("case", TORCH)
def test_torch_s_activations_and_back(case: str) -> None:
    build, ours = TORCH[case]
    module = build()
    before = type(module), contents(module)
    x = torch.randn(400, requires_grad=True)
    plain = module(x * 1)
    report = memkern.compress(module, predicate=EVERY)
    assert type(module) is ours
    assert [(swap.names, swap.was) for swap in report.swapped] == [(("",), before[0].__name__)]
    few = module(x * 1)
    assert_same(few, plain)
    a, b = (torch.autograd.grad(y.sum(), x)[0] for y in (few, plain))
    assert 0 <= (a - b).norm() / b.norm() < 0.15
    assert memory.saved_bytes(lambda: module(x * 1)) < 400
    assert memkern.restore(module) == 1
    assert (type(module), contents(module)) == before
    assert_same(module(x * 1), plain)


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


NAMED = {
    "NewGELUActivation": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "FastGELUActivation": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "AccurateGELUActivation": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "GELUTanh": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "PytorchGELUTanh": (lambda x: F.gelu(x, approximate="tanh"), mnn.GELU, {"approximate": "tanh"}),
    "BloomGelu": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "NewGELU": (tanh_gelu, mnn.GELU, {"approximate": "tanh"}),
    "GELUActivation": (erf_gelu, mnn.GELU, {"approximate": "none"}),
    "QuickGELUActivation": (lambda x: x * torch.sigmoid(1.702 * x), mnn.QuickGELU, {}),
    "QuickGELU": (lambda x: x * torch.sigmoid(1.702 * x), mnn.QuickGELU, {}),
    "SiLUActivation": (F.silu, mnn.SiLU, {"inplace": False}),
    "MishActivation": (F.mish, mnn.Mish, {"inplace": False}),
}


@pytest.mark.parametrize("name", NAMED)
def test_activations_by_name(name: str) -> None:
    function, ours, attributes = NAMED[name]
    module = named(name, function)
    before = type(module), contents(module)
    x = torch.randn(400)
    plain = module(x)
    memkern.compress(module, 4)
    assert type(module) is ours
    assert {key: getattr(module, key) for key in attributes} == attributes
    assert module.bits == 4
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-6)
    memkern.restore(module)
    assert (type(module), contents(module)) == before


def _raises(x: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("function", [tanh_gelu, F.silu, _raises, lambda x: (x,)])
def test_a_name_that_lies_is_left_alone(function: Any) -> None:
    module = named("QuickGELUActivation", function)
    report = memkern.compress(module)
    assert not report.swapped
    assert type(module).__name__ == "QuickGELUActivation"
    assert "does not compute what QuickGELU does" in str(report)


def test_options_reach_the_modules() -> None:
    model = nn.Sequential(nn.GELU(), nn.SiLU(), nn.SiLU(inplace=True), nn.Mish())
    memkern.compress(model, 2, keep="output")
    assert [m.bits for m in model] == [2, 2, 2, 2]
    assert [m.keep for m in model[:3]] == ["output", "output", "codes"]


# What must not change


def test_all_but_the_class_stays() -> None:
    model = nn.Sequential(MLP(gpt2.NewGELUActivation()), nn.Sequential(nn.Linear(16, 16), nn.SiLU()))
    seen: list[str] = []
    model[0].act.register_forward_hook(lambda *_: seen.append("after"))
    model[0].act.register_forward_pre_hook(lambda *_: seen.append("before"))
    model[0].c_fc.register_full_backward_hook(lambda *_: seen.append("backward"))
    model[1][0].register_buffer("extra", torch.ones(2))
    model[1].eval()
    modules = [*model.modules()]
    state, flags = model.state_dict(), [m.training for m in modules]
    parameters = [*model.parameters()]
    memkern.compress(model, linear=0.5)
    assert len({type(m) for m in modules} & {mnn.GELU, mnn.SiLU, mnn.RandomizedLinear}) == 3
    assert [*model.modules()] == modules
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(model.state_dict(), state)
    assert [m.training for m in modules] == flags
    model(torch.randn(200, 16, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]
    model.load_state_dict(state)
    memkern.restore(model)
    assert {type(m) for m in modules} & {mnn.GELU, mnn.SiLU, mnn.RandomizedLinear} == set()


def test_idempotent_and_adjustable() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Embedding(4, 4))
    options = {"linear": 0.5, "embeddings": True}
    first = memkern.compress(model, **options)
    assert (len(first.swapped), first.marked) == (2, ("2",))
    again = memkern.compress(model, **options)
    assert (again.swapped, again.marked) == ((), ())
    changed = memkern.compress(model, 4)
    assert [swap.names for swap in changed.swapped] == [("1",)]
    assert changed.swapped[0].before == 4  # of the original, not of 3 bits
    assert (model[1].bits, model[0].keep) == (4, 0.5)
    memkern.compress(model, None, linear={"keep": 0.25, "projection": "dct", "min_tokens": 7})
    assert (model[0].keep, model[0].projection, model[0].min_tokens, model[1].bits) == (0.25, "dct", 7, 4)
    assert memkern.restore(model) == 3
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Embedding]
    assert "keep" not in vars(model[0])
    assert memkern.restore(model) == 0


def test_modules_of_memkern_s_own_are_not_restored() -> None:
    model = nn.Sequential(mnn.GELU(bits=2), mnn.RandomizedLinear(4, 4))
    assert not memkern.compress(model, linear=0.5).swapped
    assert memkern.restore(model) == 0
    assert (type(model[0]), model[0].bits, model[1].keep) == (mnn.GELU, 2, 0.2)


def test_a_shared_module_is_swapped_once() -> None:
    act = nn.GELU()
    model = nn.Sequential(MLP(act), MLP(act))
    report = memkern.compress(model)
    (swap,) = report.swapped
    assert swap.names == ("0.act", "1.act")
    assert model[0].act is model[1].act is act
    assert report.bytes_per_token == 2 * 64 * (4 - 0.375)
    assert memkern.restore(model) == 1


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_swapped_and_can_be_restored(way: str) -> None:
    model = nn.Sequential(MLP(gpt2.NewGELUActivation()), MLP(nn.SiLU()))
    memkern.compress(model, linear=0.5)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin[0].act) is mnn.GELU
    assert memkern.restore(twin) == 6
    assert type(twin[0].act) is gpt2.NewGELUActivation
    assert type(model[0].act) is mnn.GELU
    x = torch.randn(5, 16)
    torch.testing.assert_close(twin(x), model(x))


def test_swaps_after_compiling_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(300, 16)
    plain = memory.saved_bytes(lambda: compiled(x), x)
    memkern.compress(compiled)
    assert type(model[1]) is mnn.GELU
    assert memory.saved_bytes(lambda: compiled(x), x) == plain - 300 * 64 * 4 + 300 * 64 * 3 // 8
    memkern.restore(compiled)
    assert memory.saved_bytes(lambda: compiled(x), x) == plain
    torch._dynamo.reset()


# What is left alone


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
    assert {left.names[0] for left in report.left} == {"0", "1", "2", "3.out_proj"}
    assert "0: OwnForward, a subclass of torch.nn.GELU may do more" in str(report)


def test_a_forward_on_the_instance_is_left_alone() -> None:
    module = nn.GELU()
    module.forward = lambda x: x  # as accelerate's hooks do
    assert "its forward is set on the instance" in str(memkern.compress(module))
    assert type(module) is nn.GELU


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class Decorated(Calls):
    @functools.wraps(Calls.forward)
    def forward(self, *args: Any) -> Tensor:
        return Calls.forward(self, *args)


class Holds(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.activation_fn = function

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_fn(x)


class HasAChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (Calls(), "gelu"),
        (Decorated(), "gelu"),
        (Holds(F.silu), "silu"),
        (Holds(functools.partial(F.gelu, approximate="tanh")), "gelu"),
        (nn.TransformerEncoderLayer(8, 1, activation="gelu"), "gelu"),
        (Holds(F.relu), None),
        (nn.TransformerEncoderLayer(8, 1), None),
        (HasAChild(), None),
        (nn.Linear(3, 3), None),
    ],
    ids=[
        "calls",
        "decorated",
        "holds",
        "holds a partial",
        "torch's layer",
        "relu",
        "torch's with relu",
        "child",
        "linear",
    ],
)
def test_calls_of_functions_are_reported(module: nn.Module, function: str | None) -> None:
    report = memkern.compress(nn.Sequential(module))
    assert [left.reason.split(" itself")[0] for left in report.left] == (
        [f"calls {function}"] if function else []
    )


@pytest.mark.parametrize("build", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_activations_whose_output_is_kept_anyway_are_left_by_default(build: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), build(), nn.Linear(16, 16))
    x = torch.randn(100, 16)
    before = memory.saved_bytes(lambda: model(x))
    assert "torch keeps its output" in str(memkern.compress(model))
    assert memory.saved_bytes(lambda: model(x)) == before
    memkern.compress(model, predicate=EVERY)
    assert memory.saved_bytes(lambda: model(x)) > before


# Linear layers


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(50, 16), MLP(nn.GELU()), nn.Linear(16, 50, bias=False))
    model[2].weight = model[0].weight
    return model


def test_tied_heads_are_left_unless_asked_for() -> None:
    model = tied()
    report = memkern.compress(model, None, linear=0.25)
    assert {swap.names[0] for swap in report.swapped} == {"1.c_fc", "1.c_proj"}
    assert "2: Linear, it shares its weight with 0" in str(report)
    memkern.restore(model)
    report = memkern.compress(model, None, linear=0.25, predicate=lambda name, module: name == "2")
    assert {swap.names[0] for swap in report.swapped} == {"2"}
    assert model[2].weight is model[0].weight
    F.cross_entropy(model(torch.arange(50).repeat(4)), torch.arange(50).repeat(4)).backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_linear_layers_share_their_parameters_with_before() -> None:
    model = MLP(nn.GELU())
    x = torch.randn(300, 16, requires_grad=True)
    plain = model(x)
    weight = model.c_fc.weight
    report = memkern.compress(model, None, linear=0.2)
    assert model.c_fc.weight is weight
    assert_same(model(x), plain)
    assert report.bytes_per_token == pytest.approx((16 + 64) * 4 * 0.8)
    kept = memory.saved_bytes(lambda: model(x), x)
    assert kept == 300 * 64 * 4 + 60 * (16 + 64) * 4 + 2 * 16


def test_frozen_layers_save_nothing() -> None:
    model = MLP(nn.GELU()).requires_grad_(False)
    assert memkern.compress(model, None, linear=0.2).bytes_per_token == 0


def test_conv1d() -> None:
    layer = gpt2.Conv1D(48, 16)
    x = torch.randn(2, 100, 16, requires_grad=True)
    grad = torch.randn(2, 100, 48)
    leaves = [x, layer.weight, layer.bias]
    plain = layer(x)
    expected = torch.autograd.grad(plain, leaves, grad)
    report = memkern.compress(layer, linear=0.25)
    assert report.bytes_per_token == 16 * 4 * 0.75
    assert "nf=48, nx=16, keep=0.25" in str(report)
    assert_same(layer(x), plain)
    assert memory.saved_bytes(lambda: layer(x)) == 50 * 16 * 4 + 16
    ours = torch.autograd.grad(layer(x), leaves, grad)
    assert_same([ours[0], ours[2]], [expected[0], expected[2]])
    mean = torch.stack([torch.autograd.grad(layer(x), layer.weight, grad)[0] for _ in range(400)]).mean(0)
    assert (mean - expected[1]).norm() < 0.2 * expected[1].norm()
    assert memkern.restore(layer) == 1
    assert type(layer) is gpt2.Conv1D
    assert repr(layer).startswith("Conv1D")


# The report


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


def test_report_groups_layers_and_says_everything() -> None:
    model = nn.Sequential(
        *(MLP(gpt2.NewGELUActivation()) for _ in range(12)), nn.Embedding(3, 3), nn.GELU(), Calls()
    )
    shown = str(memkern.compress(model.bfloat16(), embeddings=True))
    now = "GELU(approximate='tanh', bits=3, keep='codes')"
    saved = 64 * (8 - 0.375)
    assert (
        f"*.act (12 of them): NewGELUActivation -> {now}, 8 -> 0.375 bytes per element, {saved:,.0f}" in shown
    )
    assert (
        "13: GELU -> GELU(approximate='none', bits=3, keep='codes'), 2 -> 0.375 bytes per element\n" in shown
    )
    assert f"saved per token: {12 * saved:,.0f} bytes" in shown
    assert "1 embeddings marked" in shown
    assert "14: Calls, calls gelu itself" in shown
    assert str(memkern.compress(nn.Identity())) == "memkern.compress: 0 modules swapped"


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.GELU(), {"activations": 5}, ValueError, "bits"),
        (nn.GELU(), {"activations": 0}, ValueError, "bits"),
        (nn.GELU(), {"keep": "input"}, ValueError, "keep"),
        (nn.GELU(), {"linear": 0.0}, ValueError, "keep must be a share of the tokens"),
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


# What it saves


@pytest.mark.parametrize("width", [768, 1600])
def test_gpt2_block(width: int) -> None:
    """28 tensors of the width become 12, and 3 bits for each of 4 widths; FACTS.md has the same figures."""
    block = gpt2.Block(width)
    x = torch.randn(1, 64, width, requires_grad=True)
    per_token = lambda: memory.saved_bytes(lambda: block(x)) / 64  # noqa: E731
    statistics = 2 * 8 + 4 * width // 64  # of two layer norms, and the attention's log-sums
    assert per_token() == 28 * 4 * width + statistics
    report = memkern.compress(block)
    assert per_token() == 12 * 4 * width + 4 * width * 3 / 8 + statistics
    assert report.bytes_per_token == (16 - 3 / 8) * 4 * width
    if width == 768:
        assert per_token() <= 38_500
    memkern.restore(block)
    assert per_token() == 28 * 4 * width + statistics


def test_gpt2_block_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2", reason="needs transformers")
    options = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_implementation": "sdpa"}
    block = modeling.GPT2Block(modeling.GPT2Config(n_embd=768, n_head=12, **options), layer_idx=0)
    x = torch.randn(1, 200, 768, requires_grad=True)
    per_token = lambda: memory.saved_bytes(lambda: block(x)) / 200  # noqa: E731
    assert 85_500 < per_token() < 86_500
    memkern.compress(block)
    assert per_token() <= 38_500
    memkern.compress(block, linear=0.2)
    assert per_token() <= 24_200
    assert memkern.restore(block) == 5


def test_activations_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations", reason="needs transformers")
    for name in (
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_accurate",
        "gelu_pytorch_tanh",
        "quick_gelu",
        "silu",
        "mish",
    ):
        module = activations.ACT2FN[name]
        x = torch.randn(1000)
        plain = module(x)
        assert len(memkern.compress(module).swapped) == 1, name
        torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-6)


def test_training_follows_the_exact_model() -> None:
    x = torch.randn(400, 16)
    target = torch.sin(2 * x)
    losses = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = MLP(nn.GELU())
        if compressed:
            memkern.compress(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(100):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.6 * target.var()
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# Advice


def test_advice_is_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(300, 16)
    advice = mnn.advise(model, x)
    size = 300 * 64
    assert advice.modes == {
        "as it is": 2 * 4 * size,
        **{f"{bits} bit{'s' * (bits > 1)}": 4 * size + bits * size // 8 for bits in (1, 2, 3, 4)},
        "output": 4 * size + size // 8,
    }
    assert (advice.modules, advice.best) == (1, "output")
    shown = str(advice)
    assert "3 bits" in shown
    assert f"{4 * size + 3 * size // 8:,} bytes" in shown
    model.insert(2, nn.Dropout(0.1))  # now nobody else keeps the output
    assert mnn.advise(model, x).best == "1 bit"


def test_advice_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5), nn.Embedding(2, 2)
    )
    memkern.compress(model, 2, linear=0.5, embeddings=True)
    state = copy.deepcopy(model.state_dict())
    x, random = torch.randn(300, 16), torch.get_rng_state()
    with torch.no_grad():
        advice = mnn.advise(model[:4], (x,))
    assert torch.equal(torch.get_rng_state(), random)
    assert advice.modes["as it is"] > advice.modes["3 bits"]
    assert_same(model.state_dict(), state)
    assert (type(model[2]), model[2].bits, model[0].keep) == (mnn.GELU, 2, 0.5)
    assert memkern.restore(model) == 3


def test_advice_takes_keywords() -> None:
    advice = mnn.advise(MLP(nn.SiLU()), {"x": torch.randn(20, 16)})
    assert advice.modes["as it is"] > advice.modes["1 bit"]
