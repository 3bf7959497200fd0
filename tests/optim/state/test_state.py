"""A run resumes bit for bit from its state_dict; corrupt and foreign states are refused."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim import loading
from tests.support.generic_optimizers import saved_and_loaded
from tests.support.helpers import (
    FLOATS,
    OPTIMIZERS,
    assert_same,
    like,
    make_params,
    name_of,
    over_optimizers,
    snapshot,
    train,
)

# Options that come with a state, and those that are the optimizer's own
OPTIONS = ({"codec": "power"}, {"codec": "dynamic", "block_size": 64})
OWN_OPTIONS = ({}, {"master_weights": "bf16+16"}, {"master_weights": "bf16+8"})
# How a state dict comes from one run to the next.
TRANSPORTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as it is": lambda s: s,
    "torch.save": saved_and_loaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
}


@pytest.mark.pairwise
@over_optimizers
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["codec"])
@pytest.mark.parametrize(
    ("dtype", "own"), [*((dtype, {}) for dtype in FLOATS), *((torch.bfloat16, own) for own in OWN_OPTIONS[1:])]
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_resumed_run_equals_one_that_went_on(
    build: type, options: dict[str, Any], dtype: torch.dtype, own: dict[str, Any], transport: str
) -> None:
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params()]
    optimizer = build(params, lr=1e-2, **options, **own)
    train(optimizer, 3)
    state_dict = TRANSPORTS[transport](optimizer.state_dict())
    fresh = [torch.nn.Parameter(torch.zeros_like(p)) for p in params]
    resumed = build(fresh, **own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state_dict)
    with torch.no_grad():  # the model after the optimizer: in either order
        for p, q in zip(fresh, params, strict=True):
            p.copy_(q)
    assert_same(snapshot(resumed), snapshot(optimizer))
    for key in ("lr", "betas", "momentum", "codec", "block_size", "state_bits"):
        assert resumed.param_groups[0].get(key) == optimizer.param_groups[0].get(key)
    assert_same(train(resumed, 3, first=3), train(optimizer, 3, first=3))


def test_parameters_without_state_load() -> None:
    params = make_params()
    optimizer = optim.AdamW8bit(params)
    params[0].grad = like(params[0], 0)
    optimizer.step()
    loaded = optim.AdamW8bit(make_params())
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert [len(loaded.state.get(p, {})) for p in loaded.param_groups[0]["params"]] == [5, 0, 0]
    train(loaded, 1)


# ---- what does not fit


def put(key: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def corrupt(state_dict: dict[str, Any]) -> None:
        state = state_dict["state"][0]
        state[key] = change(state[key])

    return corrupt


def spoil(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = value
    return x


CORRUPT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "codes as floats": put("exp_avg", torch.Tensor.float),
    "codes as bf16": put("exp_avg_sq", torch.Tensor.bfloat16),
    "signed codes of v": put("exp_avg_sq", lambda x: x.view(torch.int8)),
    "codes of another shape": put("exp_avg", lambda x: x[:-1]),
    "codes transposed": put("exp_avg", lambda x: x.t().contiguous()),
    "scale of another shape": put("exp_avg_scale", lambda x: x.reshape(-1)),
    "scale as fp16": put("exp_avg_sq_scale", torch.Tensor.half),
    "scale negative": put("exp_avg_scale", lambda x: spoil(x, -1.0)),
    "scale NaN": put("exp_avg_scale", lambda x: spoil(x, float("nan"))),
    "scale infinite": put("exp_avg_sq_scale", lambda x: spoil(x, float("inf"))),
    "step negative": put("step", lambda x: x - 10),
    "step NaN": put("step", lambda x: x * float("nan")),
    "step infinite": put("step", lambda x: x * float("inf")),
    "step as a text": put("step", lambda x: "3"),
    "step as many": put("step", lambda x: x.expand(2)),
    "codes as a list": put("exp_avg", lambda x: x.tolist()),
    "no codes": put("exp_avg", lambda x: None),
    "no step": put("step", lambda x: None),
    "no state": lambda s: s["state"].update({0: None}),
    "a key is missing": lambda s: s["state"][0].pop("exp_avg_scale"),
    "a key too many": lambda s: s["state"][0].update(max_exp_avg_sq=torch.ones(64, 128)),
    "last tensor, codes where its scale is missing": lambda s: s["state"][2].pop("exp_avg"),
    "block_size out of range": lambda s: s["param_groups"][0].update(block_size=12),
    "block_size of another layout": lambda s: s["param_groups"][0].update(block_size=256),
    "unknown codec": lambda s: s["param_groups"][0].update(codec="log"),
    "lr as a text": lambda s: s["param_groups"][0].update(lr="1e-3"),
    "weight_decay infinite": lambda s: s["param_groups"][0].update(weight_decay=float("inf")),
    "state_bits 4": lambda s: s["param_groups"][0].update(state_bits=4),
    "betas out of range": lambda s: s["param_groups"][0].update(betas=(0.9, 1.5)),
    "an option is missing": lambda s: s["param_groups"][0].pop("codec"),
    "a parameter fewer": lambda s: s["param_groups"][0]["params"].pop(),
    "a group more": lambda s: s["param_groups"].append({**s["param_groups"][0], "params": [3]}),
}


def assert_refused(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], match: str | None = None) -> None:
    """Loading raises ValueError and leaves the optimizer as it was."""
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state_dict)
    assert_same(snapshot(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_states_are_refused(name: str) -> None:
    source = optim.AdamW8bit(make_params())
    train(source)
    state_dict = copy.deepcopy(source.state_dict())
    CORRUPT[name](state_dict)
    untouched = copy.deepcopy(state_dict)
    target = optim.AdamW8bit(make_params(), lr=0.5)
    train(target, 1)
    assert_refused(target, state_dict)
    assert [*(state_dict["state"][0] or ())] == [*(untouched["state"][0] or ())]
    target.load_state_dict(source.state_dict())  # and it can still load what fits
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_load_that_ends_late_leaves_the_optimizer_as_it_was(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by a KeyboardInterrupt while states are copied, or as the groups' max_grad_norm differ."""
    first, *others = make_params()
    optimizer = optim.AdamW8bit([{"params": [first]}, {"params": others}], max_grad_norm=1.0)
    train(optimizer, 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    train(optimizer, 1)
    before = snapshot(optimizer)
    with monkeypatch.context() as patch:
        if interrupted:
            copied, copies = loading._copied, itertools.count()

            def copied_until_the_fourth(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
                if next(copies) == 3:
                    raise KeyboardInterrupt
                return copied(x, p)

            patch.setattr(loading, "_copied", copied_until_the_fourth)
        else:
            patch.setitem(optimizer.param_groups[0], "max_grad_norm", 2.0)
        with pytest.raises(KeyboardInterrupt if interrupted else ValueError):
            optimizer.load_state_dict(state_dict)
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1)


def bitsandbytes_like(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    state = {
        i: {
            "step": 3,
            "state1": torch.zeros(p.shape, dtype=torch.uint8),
            "state2": torch.zeros(p.shape, dtype=torch.uint8),
        }
        for i, p in enumerate(params)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "alpha": 0.0, "t_alpha": None}
    return {"state": state, "param_groups": [{**group, "params": [*range(len(params))]}]}


@over_optimizers
def test_foreign_states_are_refused(build: type) -> None:
    params = make_params()
    converters = {
        optim.Adam: r"memkern\.optim\.from_torch_state_dict and memkern\.optim\.from_bitsandbytes_state_dict convert",
        optim.Lion: r"memkern\.optim\.from_bitsandbytes_state_dict converts others$",
    }
    message = next((x for kind, x in converters.items() if issubclass(build, kind)), "no converter to it exists")
    for cls, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        source = cls(make_params(), lr=1e-3, **options)
        train(source, 2)
        target = build(params)
        train(target, 1)
        assert_refused(target, source.state_dict(), match=f"one of memkern's {build.__name__}: .*{message}")
    assert_refused(build(params), bitsandbytes_like(params), match=message)


@pytest.mark.parametrize("target_class", OPTIMIZERS, ids=name_of)
def test_states_load_between_adam_and_adamw_alone(target_class: type) -> None:
    """Other algorithms load their own states alone. The states may have 8 or 32 bits (test_loading.py)."""
    for source_class in OPTIMIZERS:
        source, target = source_class(make_params([(64, 128)])), target_class(make_params([(64, 128)]))
        train(source, 1)
        if target_class.__name__[:3] != source_class.__name__[:3]:
            assert_refused(target, source.state_dict())
            continue
        same_bits = source.defaults["state_bits"] == target.defaults["state_bits"]
        decouples = target_class.__name__.startswith("AdamW") and not source_class.__name__.startswith("AdamW")
        with nullcontext() if same_bits and not decouples else pytest.warns(UserWarning, match="whose own win"):
            target.load_state_dict(source.state_dict())
        if same_bits:
            assert_same(snapshot(target)["states"], snapshot(source)["states"])
        train(target, 1, first=1)
