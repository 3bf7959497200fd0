"""LAMB and LARS: their trust ratios and bounds, tensors that hold several layers, options, and steps as timm's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from tests.support import timm_factory
from tests.support.helpers import (
    LAYOUTS,
    assert_same,
    hard,
    like,
    make_params,
    on,
    over_cpu,
    over_layerwise,
    snapshot,
    tensor,
    train,
)
from tests.support.optimizers import cases

# ---- tensors that hold several layers

# name: class, options
FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "LAMB": (optim.LAMB, {}),
    "LARS": (optim.LARS, {}),
    "classic LARS": (optim.LARS, {"trust_coeff": 1e-2}),
}
BOUNDED = {"bounded LAMB": (optim.LAMB, {"trust_bounds": (2.0, 4.0)})}


def over_forms(forms: dict[str, tuple[type, dict[str, Any]]], **common: Any) -> Any:
    """Runs a test with the class and the options of each form, and the common options."""
    cases = [(build, options | common) for build, options in forms.values()]
    return pytest.mark.parametrize(("build", "options"), cases, ids=forms)


@pytest.mark.pairwise
@over_cpu
@over_forms(FORMS | BOUNDED, lr=1e-2, weight_decay=0.1)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("layers", "shape", "block_size"),
    [
        (3, (96, 64), 128),
        (3, (12, 300), 128),
        ("rows", (7, 200), 128),
        ("rows", (9, 24), 24),
        (2, (4, 6, 50), 256),
    ],
)
def test_layers_step_as_tensors_of_their_own(
    backend: str,
    build: type,
    options: dict[str, Any],
    bits: int,
    layers: int | str,
    shape: Any,
    block_size: int,
) -> None:
    options |= {"state_bits": bits, "min_8bit_size": 0, "block_size": block_size}
    stacked = torch.nn.Parameter(hard(shape, 0, scale=0.1))
    count = shape[0] if layers == "rows" else layers
    parts = [torch.nn.Parameter(part.clone()) for part in stacked.detach().chunk(count)]
    joined, separate = build([stacked], layers=layers, **options), build(parts, **options)
    with on(backend):
        for step in range(3):
            stacked.grad = hard(shape, 10 + step)
            for part, g in zip(parts, stacked.grad.chunk(count), strict=True):
                part.grad = g.clone()
            joined.step()
            separate.step()
    assert_same(stacked.detach(), torch.cat([p.detach() for p in parts]))
    (ratios,) = joined.trust_ratios().values()
    assert_same(ratios, torch.cat([*separate.trust_ratios().values()]))
    assert len(ratios.unique()) == count


# name: shape, options, the error's message
LAYERS_THAT_DO_NOT_FIT: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "rows do not divide": ((64, 128), {"layers": 3}, "layers must divide the rows of a tensor, 64"),
    "a layer ends inside a block": ((6, 60), {"layers": "rows"}, "block_size of at most 60, a row's length"),
    "a layer of three rows ends inside one": ((9, 50), {"layers": 3}, "inside its blocks of 100"),
    "0": ((64, 128), {"layers": 0}, "layers must be a number of layers, 1 or more, or 'rows', got 0"),
    "a name": ((64, 128), {"layers": "columns"}, "or 'rows', got 'columns'"),
    "a bool": ((64, 128), {"layers": True}, "layers must be a number of layers"),
}


@over_layerwise
@pytest.mark.parametrize("name", LAYERS_THAT_DO_NOT_FIT)
def test_layers_that_do_not_fit_are_refused(build: type, name: str) -> None:
    shape, options, message = LAYERS_THAT_DO_NOT_FIT[name]
    with pytest.raises(ValueError, match=message):
        build(make_params([shape]), **options)
    optimizer = build(make_params())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make_params([shape]), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("layers", [3, "rows"])
def test_vectors_and_scalars_are_one_layer(layers: int | str) -> None:
    optimizer = optim.LAMB(make_params([(3, 128), (100,), (), (0, 128)]), layers=layers)
    train(optimizer, 1)
    assert [len(r) for r in optimizer.trust_ratios().values()] == [3, 1, 1, 1]


# ---- trust ratios


@over_layerwise
def test_trust_ratios_gives_those_of_the_last_step_by_name(build: type) -> None:
    weight, bias, frozen = make_params([(64, 128), (300,), (5,)])
    groups = [
        {"params": [("weight", weight), ("frozen", frozen)]},
        {"params": [("bias", bias)], "weight_decay": 0.0},
    ]
    optimizer = build(groups, lr=1e-2)
    assert optimizer.trust_ratios() == {}
    weight.grad, bias.grad = like(weight, 1), like(bias, 2)
    optimizer.step()
    ratios = {name: float(x) for name, x in optimizer.trust_ratios().items()}
    assert [*ratios] == ["weight", "bias"]
    assert ratios["bias"] == 1.0
    assert ratios["weight"] not in (0.0, 1.0)
    assert math.isfinite(ratios["weight"])
    ratio = optimizer.trust_ratios()["weight"]
    assert (ratio.dtype, ratio.shape, ratio.device) == (torch.float32, (1,), weight.device)
    optimizer.step()
    assert float(ratio) != ratios["weight"]  # it is the state's own tensor


@over_cpu
@over_layerwise
def test_a_ratio_is_one_where_a_norm_is_zero(backend: str, build: type) -> None:
    zero_weight, zero_grad = torch.nn.Parameter(torch.zeros(8, 16)), torch.nn.Parameter(torch.ones(8, 16))
    optimizer = build([zero_weight, zero_grad], lr=1e-2, weight_decay=0.0, always_adapt=True)
    zero_weight.grad, zero_grad.grad = torch.ones(8, 16), torch.zeros(8, 16)
    with on(backend):
        optimizer.step()
    assert [float(r) for r in optimizer.trust_ratios().values()] == [1.0, 1.0]
    assert (zero_weight < 0).all()
    assert (zero_grad == 1).all()


@over_layerwise
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_leaves_the_other_elements_of_its_layer_finite(build: type, bad: float) -> None:
    p = torch.nn.Parameter(hard((4, 300), 0, scale=0.1))
    optimizer = build([p], lr=1e-2, weight_decay=0.1, min_8bit_size=0)
    for step in range(3):
        p.grad = hard((4, 300), 10 + step)
        if step == 1:
            p.grad[2, 200] = bad
        optimizer.step()
    wrong = (~p.isfinite()).nonzero().tolist()
    assert wrong == [[2, 200]]
    assert all(value.isfinite().all() for key, value in optimizer.state[p].items() if key.endswith("scale"))


@over_cpu
@over_forms(FORMS, lr=1e-2, weight_decay=0.1, trust_clip=True)
def test_no_clipped_ratio_is_above_one(backend: str, build: type, options: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(1e3 * p.detach()) for p in make_params()]
    optimizer = build(params, **options)
    with on(backend):
        train(optimizer, 1)
    assert all(float(r) == 1.0 for r in optimizer.trust_ratios().values())


@over_cpu
@over_layerwise
def test_norms_count_every_element_once(backend: str, build: type) -> None:
    # With eps 0, padding counted as an element would be 0 / 0 in LAMB.
    for layout in LAYOUTS:
        if "empty" in layout:
            continue
        p = torch.nn.Parameter(tensor(layout, scale=0.1))
        optimizer = build([p], lr=0.0, weight_decay=0.0, always_adapt=True, eps=0.0, min_8bit_size=0)
        p.grad = torch.full_like(p, 0.25)
        with on(backend):
            optimizer.step()
        (ratio,) = optimizer.trust_ratios().values()
        # An element of the first update is 1 in LAMB, and a tenth of the gradient in LARS.
        norm = math.sqrt(p.numel()) * (1.0 if "LAMB" in build.__name__ else 0.025)
        assert float(ratio) == pytest.approx(float(p.detach().double().norm()) / norm, rel=1e-6), layout


# ---- bounds on norms


@over_cpu
def test_zero_weights_start_by_the_lower_bound(backend: str) -> None:
    p = torch.nn.Parameter(torch.zeros(8, 64))
    optimizer = optim.LAMB([p], lr=1.0, weight_decay=0.1, eps=0.0, trust_bounds=(2.0, 10.0))
    p.grad = torch.ones_like(p)
    with on(backend):
        optimizer.step()
    assert p.detach().norm().item() == pytest.approx(2.0, rel=1e-6), "lr * low"


# ---- options


def test_positional_arguments_are_timms() -> None:
    params = make_params()
    group = optim.LAMB(params, 1e-2, False, (0.8, 0.9), 1e-5, 0.3, True, 2.0, True, True).param_groups[0]
    expected = {
        "lr": 1e-2, "bias_correction": False, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3,
        "max_grad_norm": 2.0, "trust_clip": True, "always_adapt": True, "decoupled_decay": False,
    }  # fmt: skip
    assert {key: group[key] for key in expected} == expected
    group = optim.LARS8bit(params, 1.0, 0.8, 0.0, 0.3, True, 1e-3, 1e-5, True, True).param_groups[0]
    expected = {
        "lr": 1.0, "momentum": 0.8, "dampening": 0.0, "weight_decay": 0.3, "nesterov": True, "trust_coeff": 1e-3,
        "eps": 1e-5, "trust_clip": True, "always_adapt": True, "state_bits": 8,
    }  # fmt: skip
    assert {key: group[key] for key in expected} == expected


@over_layerwise
@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(()), torch.ones(1).half()], ids=str)
def test_a_trust_ratio_of_a_wrong_kind_is_not_loaded(build: type, bad: Tensor) -> None:
    optimizer = build(make_params())
    before = train(optimizer, 1)
    state_dict = optimizer.state_dict()
    state_dict = {**state_dict, "state": {k: dict(v) for k, v in state_dict["state"].items()}}
    state_dict["state"][0]["trust_ratio"] = bad
    with pytest.raises(ValueError, match=r"trust_ratio must be float32 of shape \(1,\)"):
        optimizer.load_state_dict(state_dict)
    assert_same(snapshot(optimizer), before)


# ---- timm's

OF_TIMM = cases("of_timm")


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_moves_parameters_alike(name: str) -> None:
    spec, options = OF_TIMM[name]
    try:
        timm = timm_factory.optimizer(spec.timm)
    except ModuleNotFoundError:
        pytest.skip("timm is not installed; its update is in tests/support/optimizers too")
    runs = []
    for make, class_options in ((spec.cls, {}), (timm, spec.timm_options)):
        params = make_params(seed=3)
        optimizer = make(params, **class_options | options)
        runs.append(train(optimizer, 50)["params"])
    for ours, theirs in zip(*runs, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
