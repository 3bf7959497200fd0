"""memkern.compress and restore: modules and bytes that change, and all of a model that must stay."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation
from transformers.models.gpt2 import modeling_gpt2
from transformers.pytorch_utils import Conv1D

import memkern
from memkern import memory
from memkern import nn as mnn
from memkern.swap import match
from tests.support import timm_factory
from tests.support.helpers import assert_same
from tests.support.swap_helpers import EVERY, MLP

# torch's module, and the class that compress gives it
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
    "ELU": (lambda: nn.ELU(0.5), mnn.ELU),
    "CELU": (lambda: nn.CELU(2.0), mnn.CELU),
    "SELU in place": (lambda: nn.SELU(inplace=True), mnn.SELU),
    "LogSigmoid": (nn.LogSigmoid, mnn.LogSigmoid),
    "Softsign": (nn.Softsign, mnn.Softsign),
    "Tanhshrink": (nn.Tanhshrink, mnn.Tanhshrink),
    "Hardsigmoid": (nn.Hardsigmoid, mnn.Hardsigmoid),
    "Hardshrink": (lambda: nn.Hardshrink(0.25), mnn.Hardshrink),
    "Softshrink": (lambda: nn.Softshrink(0.25), mnn.Softshrink),
    "Threshold": (lambda: nn.Threshold(0.25, -2.0), mnn.Threshold),
    "ReLU": (nn.ReLU, mnn.ReLU),
    "Tanh": (nn.Tanh, mnn.Tanh),
    "Sigmoid": (nn.Sigmoid, mnn.Sigmoid),
}


def named(name: str, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of a class with that name."""
    return type(name, (nn.Module,), {"forward": lambda self, input: function(input)})()


def contents(module: nn.Module) -> dict[str, Any]:
    """A copy of a module's attributes."""
    return {key: copy.copy(value) for key, value in vars(module).items()}


# ---- activations


@pytest.mark.parametrize("case", TORCH)
def test_torchs_activations_are_swapped_and_restored(case: str) -> None:
    build, ours = TORCH[case]
    module = build()
    before = type(module), contents(module)
    x = torch.randn(400, requires_grad=True)
    plain = module(x * 1)
    report = memkern.compress(module, predicate=EVERY)
    assert type(module) is ours
    assert [(swap.names, swap.was) for swap in report.swapped] == [(("",), before[0].__name__)]
    compressed = module(x * 1)
    assert_same(compressed, plain)
    gradient, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (compressed, plain))
    assert 0 <= (gradient - expected).norm() / expected.norm() < 0.15
    assert memory.saved_bytes(lambda: module(x * 1)) < 400
    assert memkern.restore(module) == 1
    assert (type(module), contents(module)) == before
    assert_same(module(x * 1), plain)


TANH: dict[str, Any] = {"approximate": "tanh"}
# module and name of a class: the class that compress gives it, and attributes
OF_LIBRARIES: dict[tuple[str, str], tuple[type[nn.Module], dict[str, Any]]] = {
    ("transformers.activations", "NewGELUActivation"): (mnn.GELU, TANH),
    ("transformers.activations", "FastGELUActivation"): (mnn.GELU, TANH),
    ("transformers.activations", "AccurateGELUActivation"): (mnn.GELU, TANH),
    ("transformers.activations", "GELUTanh"): (mnn.GELU, TANH),
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"): (mnn.GELU, TANH),
    ("transformers.activations", "GELUActivation"): (mnn.GELU, {"approximate": "none"}),
    ("transformers.activations", "QuickGELUActivation"): (mnn.QuickGELU, {}),
    ("transformers.activations", "SiLUActivation"): (mnn.SiLU, {"inplace": False}),
    ("transformers.activations", "MishActivation"): (mnn.Mish, {"inplace": False}),
    ("timm.layers.activations", "GELU"): (mnn.GELU, {"approximate": "none"}),
    ("timm.layers.activations", "GELUTanh"): (mnn.GELU, TANH),
    ("timm.layers.activations", "QuickGELU"): (mnn.QuickGELU, {}),
    ("timm.layers.activations", "Swish"): (mnn.SiLU, {"inplace": False}),
    ("timm.layers.activations", "Mish"): (mnn.Mish, {"inplace": False}),
    ("timm.layers.activations", "HardSwish"): (mnn.Hardswish, {"inplace": False}),
}


def test_every_class_of_other_libraries_is_tried() -> None:
    assert {*OF_LIBRARIES} == {*match.LIBRARY_CLASSES}


@pytest.mark.parametrize("key", OF_LIBRARIES, ids=lambda key: key[1])
def test_activations_of_other_libraries_are_swapped(key: tuple[str, str]) -> None:
    ours, attributes = OF_LIBRARIES[key]
    if key[0].startswith("timm"):
        timm_factory.load()
    library = pytest.importorskip(key[0])
    module = getattr(library, key[1])()
    before = type(module), vars(module).copy()
    x = torch.randn(400)
    plain = module(x.clone())
    memkern.compress(module, 4)
    assert type(module) is ours
    assert {name: getattr(module, name) for name in attributes} == attributes
    assert module.bits == 4
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-6)
    memkern.restore(module)
    assert (type(module), vars(module)) == before


def test_a_class_of_the_same_name_is_left_alone() -> None:
    """Also a class whose __module__ is the library's, where the library has another class of that name."""
    pytest.importorskip("transformers.activations")
    for module_name in (__name__, "transformers.activations"):
        module = named("QuickGELUActivation", F.silu)
        type(module).__module__ = module_name
        report = memkern.compress(module)
        assert not report.swapped
        assert type(module).__name__ == "QuickGELUActivation"
        assert f"{module_name}.QuickGELUActivation is no class that compress knows" in str(report)


def test_options_of_compress_reach_the_modules() -> None:
    model = nn.Sequential(nn.GELU(), nn.SiLU(), nn.SiLU(inplace=True), nn.Mish())
    memkern.compress(model, "output")
    assert [m.bits for m in model] == [3, 3, 3, 3]
    memkern.compress(model, 2)
    assert [m.bits for m in model] == [2, 2, 2, 2]
    memkern.compress(model, "output")
    assert [m.keep for m in model[:3]] == ["output", "output", "codes"]


# ---- what must not change


def test_all_but_the_class_stays() -> None:
    model = nn.Sequential(MLP(NewGELUActivation()), nn.Sequential(nn.Linear(16, 16), nn.SiLU()))
    calls: list[str] = []
    model[0].act.register_forward_hook(lambda *_: calls.append("after"))
    model[0].act.register_forward_pre_hook(lambda *_: calls.append("before"))
    model[0].c_fc.register_full_backward_hook(lambda *_: calls.append("backward"))
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
    assert calls == ["before", "after", "backward"]
    model.load_state_dict(state)
    memkern.restore(model)
    assert {type(m) for m in modules} & {mnn.GELU, mnn.SiLU, mnn.RandomizedLinear} == set()


def test_compress_twice_changes_nothing_but_options_that_are_given() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Embedding(4, 4))
    options = {"linear": 0.5, "embeddings": True}
    first = memkern.compress(model, **options)
    assert (len(first.swapped), first.marked) == (2, ("2",))
    second = memkern.compress(model, **options)
    assert (second.swapped, second.marked) == ((), ())
    changed = memkern.compress(model, 4)
    assert [swap.names for swap in changed.swapped] == [("1",)]
    assert changed.swapped[0].before == 4  # of the original, not of 3 bits
    assert (model[1].bits, model[0].share) == (4, 0.5)
    memkern.compress(model, None, linear={"share": 0.25, "projection": "dct", "min_tokens": 7})
    assert (model[0].share, model[0].projection, model[0].min_tokens, model[1].bits) == (0.25, "dct", 7, 4)
    assert memkern.restore(model) == 3
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Embedding]
    assert "share" not in vars(model[0])
    assert memkern.restore(model) == 0


def test_restore_keeps_what_was_changed_after_compress() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1))
    memkern.compress(model, linear=0.5)
    model[0].out_features, model[0].weight, model[0].bias = 6, nn.Parameter(torch.randn(6, 4)), None
    model[1].negative_slope = 0.3
    expected = model(torch.ones(2, 4))
    memkern.restore(model)
    assert (model[0].out_features, model[1].negative_slope) == (6, 0.3)
    assert_same(model(torch.ones(2, 4)), expected)


def test_a_class_that_changes_after_compress_stays() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    memkern.compress(model, linear=0.5)
    nn.utils.parametrizations.weight_norm(model[0])
    x = torch.randn(5, 16)
    y = model(x)
    report = memkern.compress(model, 2, linear=0.25)
    assert [swap.names for swap in report.swapped] == [("1",)]
    assert [left.names for left in report.left] == [("0",)]
    with pytest.raises(RuntimeError, match="0 has become a ParametrizedRandomizedLinear"):
        memkern.restore(model)
    assert type(model[1]) is mnn.GELU
    assert_same(model(x), y)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert memkern.restore(model) == 2


def test_modules_that_users_made_are_not_restored() -> None:
    model = nn.Sequential(mnn.GELU(bits=2), mnn.RandomizedLinear(4, 4))
    assert not memkern.compress(model, linear=0.5).swapped
    assert memkern.restore(model) == 0
    assert (type(model[0]), model[0].bits, model[1].share) == (mnn.GELU, 2, 0.2)


def test_a_shared_module_is_swapped_once() -> None:
    act = nn.GELU()
    model = nn.Sequential(MLP(act), MLP(act))
    report = memkern.compress(model)
    (swap,) = report.swapped
    assert swap.names == ("0.act", "1.act")
    assert model[0].act is model[1].act is act
    assert report.bytes_per_token == 2 * 64 * (4 - 0.375)
    assert memkern.restore(model) == 1


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
def test_copies_are_swapped_and_can_be_restored(method: str) -> None:
    model = nn.Sequential(MLP(NewGELUActivation()), MLP(nn.SiLU()), Conv1D(16, 16))
    memkern.compress(model, linear=0.5)
    if method == "deepcopy":
        loaded = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert type(loaded[0].act) is mnn.GELU
    assert isinstance(loaded[2], Conv1D)
    assert "share=0.5" in repr(loaded[2])
    assert memkern.restore(loaded) == 7
    assert (type(loaded[0].act), type(loaded[2])) == (NewGELUActivation, Conv1D)
    assert type(model[0].act) is mnn.GELU
    x = torch.randn(5, 16)
    torch.testing.assert_close(loaded(x), model(x))


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


# ---- linear layers


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


def test_swapped_linear_layers_keep_their_parameters() -> None:
    model = MLP(nn.GELU())
    x = torch.randn(300, 16, requires_grad=True)
    plain = model(x)
    weight = model.c_fc.weight
    report = memkern.compress(model, None, linear=0.2)
    assert model.c_fc.weight is weight
    assert_same(model(x), plain)
    assert report.bytes_per_token == pytest.approx((16 + 64) * 4 * 0.8)
    saved = memory.saved_bytes(lambda: model(x), x)
    assert saved == 300 * 64 * 4 + 60 * (16 + 64) * 4 + 2 * 16  # GELU's input, 60 tokens for each layer, two seeds


def test_frozen_layers_save_nothing() -> None:
    model = MLP(nn.GELU()).requires_grad_(False)
    assert memkern.compress(model, None, linear=0.2).bytes_per_token == 0


def test_transformers_conv1d_saves_a_share_of_tokens() -> None:
    layer = Conv1D(48, 16)
    x = torch.randn(2, 100, 16, requires_grad=True)
    grad = torch.randn(2, 100, 48)
    leaves = [x, layer.weight, layer.bias]
    plain = layer(x)
    expected = torch.autograd.grad(plain, leaves, grad)
    report = memkern.compress(layer, linear=0.25)
    assert report.bytes_per_token == 16 * 4 * 0.75
    assert "nf=48, nx=16, share=0.25" in str(report)
    assert_same(layer(x), plain)
    assert memory.saved_bytes(lambda: layer(x)) == 50 * 16 * 4 + 16  # a quarter of the tokens, and the seed
    ours = torch.autograd.grad(layer(x), leaves, grad)
    assert_same([ours[0], ours[2]], [expected[0], expected[2]])
    mean = torch.stack([torch.autograd.grad(layer(x), layer.weight, grad)[0] for _ in range(400)]).mean(0)
    assert (mean - expected[1]).norm() < 0.2 * expected[1].norm()
    assert memkern.restore(layer) == 1
    assert type(layer) is Conv1D
    assert repr(layer).startswith("Conv1D")


# ---- blocks


def test_a_gpt2_block_saves_12_of_28_tensors() -> None:
    """28 tensors of the width become 12, and 3 bits for each of 4 widths."""
    width = 768
    options = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_implementation": "sdpa"}
    config = modeling_gpt2.GPT2Config(n_embd=width, n_head=width // 64, **options)
    block = modeling_gpt2.GPT2Block(config, layer_idx=0)
    x = torch.randn(1, 200, width, requires_grad=True)
    per_token = lambda: memory.saved_bytes(lambda: block(x)) / 200  # noqa: E731
    statistics = 2 * 8 + 4 * width // 64  # of two layer norms, and the attention's log-sums
    assert per_token() == 28 * 4 * width + statistics
    report = memkern.compress(block)
    assert per_token() == 12 * 4 * width + 4 * width * 3 / 8 + statistics
    assert report.bytes_per_token == (16 - 3 / 8) * 4 * width
    assert per_token() <= 38_500
    memkern.compress(block, linear=0.2)
    assert per_token() <= 24_200
    assert memkern.restore(block) == 5
    assert per_token() == 28 * 4 * width + statistics
