"""State dicts of optimizers with other classes, bits, dtypes or options are converted with a warning, or refused."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim.state import load_moment
from tests.support.helpers import (
    EIGHT_BIT,
    assert_same,
    first_moment,
    make_params,
    over_8bit,
    over_kinds,
    snapshot,
    train,
)

UNQUANTIZED = {c: getattr(optim, c.__name__.removesuffix("8bit")) for c in EIGHT_BIT}  # 8-bit class -> 32-bit class
OTHER_OPTIONS = "of an optimizer with other options than this"


def moments_of(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Every moment of the first group's parameters as floats, whatever its storage."""
    group = optimizer.param_groups[0]
    return [{name: load_moment(name, optimizer.state[p]) for name in optimizer.moments} for p in group["params"]]


# ---- the optimizer's own class and bits win


def test_a_state_of_adam_leaves_adamw_decoupled() -> None:
    source, target = optim.Adam(make_params(), lr=1e-2, weight_decay=0.5), optim.AdamW(make_params())
    train(source)
    with pytest.warns(UserWarning, match=f"{OTHER_OPTIONS} AdamW.*group 0: decoupled_weight_decay False -> True$"):
        target.load_state_dict(source.state_dict())
    group = target.param_groups[0]
    assert (group["decoupled_weight_decay"], group["weight_decay"], group["lr"]) == (True, 0.5, 1e-2)
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


def test_a_state_of_adamw_comes_to_adam_as_in_torch() -> None:
    source, target = optim.AdamW(make_params()), optim.Adam(make_params())
    train(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["decoupled_weight_decay"] is True


@over_8bit
@pytest.mark.parametrize("codec", ["power", "dynamic"])
def test_a_32_bit_state_is_quantized_for_an_8_bit_optimizer(build: type, codec: str) -> None:
    source = UNQUANTIZED[build](make_params(), codec=codec)
    train(source, 3)
    target = build(make_params())
    with pytest.warns(UserWarning, match=f"{OTHER_OPTIONS} {build.__name__}.*group 0: state_bits 32 -> 8$"):
        target.load_state_dict(source.state_dict())
    group = target.param_groups[0]
    assert (group["state_bits"], group["codec"]) == (8, codec)  # the codec comes with the state
    for i, (moments, exact) in enumerate(zip(moments_of(target), moments_of(source), strict=True)):
        assert (first_moment(target, group["params"][i]).dtype == torch.int8) == (i == 0)
        for name in exact:
            error = (moments[name] - exact[name]).abs().amax() / exact[name].abs().amax()
            assert error <= (0.02 if i == 0 else 0)  # the others are too small for 8-bit states
    fresh = build(copy.deepcopy(group["params"]))
    fresh.load_state_dict(target.state_dict())
    assert_same(train(fresh, 2), train(target, 2))


@over_8bit
def test_an_8_bit_state_is_dequantized_for_a_32_bit_optimizer(build: type) -> None:
    source, target = build(make_params()), UNQUANTIZED[build](make_params())
    train(source, 3)
    with pytest.warns(UserWarning, match="state_bits 8 -> 32"):
        target.load_state_dict(source.state_dict())
    assert_same(moments_of(target), moments_of(source))
    assert all(value.dtype == torch.float32 for state in target.state.values() for value in state.values())
    train(target, 1)


def test_one_warning_names_all_groups() -> None:
    def build(bits: int) -> optim.AdamW:
        a, b, c = make_params()
        return optim.AdamW([{"params": [a], "state_bits": bits}, {"params": [b]}, {"params": [c], "state_bits": bits}])

    source, target = build(32), build(8)
    train(source)
    with pytest.warns(UserWarning, match=OTHER_OPTIONS) as record:
        target.load_state_dict(source.state_dict())
    assert len(record) == 1
    assert str(record[0].message).endswith("group 0: state_bits 32 -> 8; group 2: state_bits 32 -> 8")
    assert record[0].filename == __file__
    assert [g["state_bits"] for g in target.param_groups] == [8, 32, 8]


@over_kinds
def test_a_state_of_the_same_options_warns_of_nothing(build: type) -> None:
    source, target = build(make_params(), lr=0.5, block_size=64), build(make_params())
    train(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["block_size"] == 64


def test_shards_keep_their_bits_whatever_their_size() -> None:
    """A shard with an 8-bit state may be smaller than min_8bit_size."""
    source = optim.AdamW8bit([torch.nn.Parameter(torch.ones(64, 128))])
    train(source)
    state_dict = source.state_dict()
    first = {key: x[:8] if x.dim() > 1 else x for key, x in state_dict["state"][0].items()}
    shard = optim.AdamW8bit([torch.nn.Parameter(torch.ones(8, 128))])
    shard.load_state_dict({**state_dict, "state": {0: first}})
    assert_same(shard.state_dict()["state"], {0: first})
    train(shard, 1)
    assert snapshot(shard)["states"][0]["exp_avg"].dtype == torch.int8


def test_capturable_stays_the_optimizers_own() -> None:
    a, b, _ = make_params()
    source = optim.AdamW8bit([{"params": [a]}, {"params": [b]}])
    train(source)
    target = optim.AdamW8bit([{"params": [make_params()[0]], "capturable": True}, {"params": [make_params()[1]]}])
    assert [isinstance(g["lr"], torch.Tensor) for g in target.param_groups] == [True, False]
    target.load_state_dict(source.state_dict())
    assert [g["capturable"] for g in target.param_groups] == [True, False]
    assert [isinstance(g["lr"], torch.Tensor) for g in target.param_groups] == [True, False]
    train(target, 1)


# ---- dtypes


@over_kinds
def test_a_state_moves_to_fp64_and_back(build: type) -> None:
    options = {"state_bits": 32}
    source = build(make_params(), **options)
    train(source, 2)
    double = build([torch.nn.Parameter(p.detach().double()) for p in make_params()], **options)
    double.load_state_dict(source.state_dict())
    back = build(make_params(), **options)
    back.load_state_dict(double.state_dict())
    for state in double.state.values():
        assert all(value.dtype == torch.float64 for key, value in state.items() if key != "step" and "ratio" not in key)
    assert_same([*map(dict, snapshot(back)["states"])], snapshot(source)["states"])
    train(double, 1)


# ---- what is refused


def with_entry(optimizer: torch.optim.Optimizer, value: float) -> dict[str, Any]:
    """The state dict with another value in a second moment."""
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["exp_avg_sq"].view(-1)[3] = value
    return state_dict


def test_negative_second_moments_are_refused() -> None:
    source, target = optim.AdamW(make_params()), optim.AdamW(make_params())
    train(source)
    before = train(target, 1)
    with pytest.raises(ValueError, match="exp_avg_sq, a second moment, has negative entries"):
        target.load_state_dict(with_entry(source, -1e-9))
    assert_same(snapshot(target), before)


def test_infinite_moments_load() -> None:
    """A run that overflowed has infinite moments, in torch too."""
    source, target = optim.AdamW(make_params()), optim.AdamW(make_params())
    train(source)
    target.load_state_dict(with_entry(source, math.inf))
    assert target.state[target.param_groups[0]["params"][0]]["exp_avg_sq"].isinf().sum() == 1


# ---- fp32 states of whole numbers, which look like codes


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (optim.SGD, {"momentum": 0.0}),
        (optim.SGD8bit, {"momentum": 0.0}),
        (optim.Lion, {"betas": (0.0, 0.0)}),
        (optim.Adam, {"betas": (0.0, 0.999)}),
        (optim.AdamW, {}),
    ],
    ids=["SGD", "SGD8bit", "Lion", "Adam", "AdamW"],
)
@pytest.mark.parametrize("largest", [127.0, 128.0, 255.0, math.nan])  # the ends of int8 and uint8
def test_fp32_states_of_whole_numbers_load(new: Any, options: dict[str, Any], largest: float) -> None:
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = new([p], **options)
    p.grad = torch.arange(40.0)
    p.grad[3] = largest
    optimizer.step()
    loaded = new([torch.nn.Parameter(p.detach().clone())], **options)
    loaded.load_state_dict(optimizer.state_dict())
    assert_same(loaded.state_dict()["state"], optimizer.state_dict()["state"])
