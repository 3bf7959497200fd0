"""state_dict and load_state_dict: a run resumes bit for bit, and nothing else's state gets in."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memkern import optim
from tests.support.helpers import (
    FLOATS,
    OPTIMIZERS,
    assert_same,
    give_gradients,
    hard,
    like,
    make_params,
    name_of,
    over_optimizers,
    snapshot,
    train,
)

CODECS = ({"codec": "power"}, {"codec": "dynamic", "block_size": 64})


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as plain tensors."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as it is": lambda s: s,
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
}


@pytest.mark.pairwise
@over_optimizers
@pytest.mark.parametrize("options", CODECS, ids=lambda o: o["codec"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_one_that_went_on(
    build: type, options: dict[str, Any], dtype: torch.dtype, way: str
) -> None:
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params()]
    optimizer = build(params, lr=1e-2, **options)
    train(optimizer, 3)
    state_dict = WAYS[way](optimizer.state_dict())
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = build(fresh)  # options come with the state
    resumed.load_state_dict(state_dict)
    assert_same(snapshot(resumed), snapshot(optimizer))
    for key in ("lr", "betas", "momentum", "codec", "block_size", "state_bits"):
        assert resumed.param_groups[0].get(key) == optimizer.param_groups[0].get(key)
    assert_same(train(resumed, 3, first=3), train(optimizer, 3, first=3))


@over_optimizers
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dtypes_are_kept_whatever_the_parameters(build: type, dtype: torch.dtype) -> None:
    source = build(make_params())
    before = train(source, 2)
    target = build([torch.nn.Parameter(p.detach().to(dtype)) for p in make_params()])
    target.load_state_dict(source.state_dict())
    assert_same(snapshot(target)["states"], before["states"])
    dtypes = {
        "exp_avg": (torch.int8, torch.float32),
        "momentum_buffer": (torch.int8, torch.float32),
        "momentum_buffer_scale": (torch.float32,),
        "exp_avg_sq": (torch.uint8, torch.float32),
        "exp_avg_scale": (torch.float32,),
        "exp_avg_sq_scale": (torch.float32,),
        "step": (torch.float32,),
        "trust_ratio": (torch.float32,),
    }
    for state in target.state.values():
        for key, value in state.items():
            assert value.dtype in dtypes[key]
    train(target, 1)


@over_optimizers
def test_state_dict_is_plain_tensors(build: type) -> None:
    optimizer = build(make_params())
    train(optimizer, 1)
    state_dict = optimizer.state_dict()
    assert {*state_dict} == {"state", "param_groups"}
    for state in state_dict["state"].values():
        assert all(type(value) is torch.Tensor for value in state.values())
    for group in state_dict["param_groups"]:
        assert all(isinstance(v, (float, int, str, bool, tuple, list, type(None))) for v in group.values())


@over_optimizers
def test_reload_before_the_first_step(build: type) -> None:
    # As accelerate does when it prepares an optimizer.
    optimizer, other = build(make_params(), lr=1e-2), build(make_params(), lr=1e-2)
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    assert_same(train(optimizer), train(other))


@over_optimizers
def test_loading_aliases_nothing(build: type) -> None:
    source = build(make_params())
    before = train(source)
    state_dict = source.state_dict()
    target = build(make_params())
    target.load_state_dict(state_dict)
    train(target)
    assert_same(snapshot(source), before)
    pointers = {t.data_ptr() for state in source.state.values() for t in state.values()}
    assert not pointers & {t.data_ptr() for state in target.state.values() for t in state.values()}
    target.param_groups[0]["lr"] = 7.0
    assert source.param_groups[0]["lr"] != 7.0


@over_optimizers
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_of_model_and_optimizer_go_on_alike(build: type, way: Callable[[Any], Any], steps: int) -> None:
    params = make_params()
    optimizer = build(params, lr=1e-2)
    train(optimizer, steps)
    for p in params:
        p.grad = None
    loaded = way((params, optimizer))[1]
    assert type(loaded) is build
    assert_same(train(loaded, 2, first=steps), train(optimizer, 2, first=steps))
    assert loaded.param_groups[0]["params"][0] is not params[0]


def test_tensor_lr_and_groups_come_back() -> None:
    def build() -> optim.AdamW8bit:
        a, b, c = make_params()
        return optim.AdamW8bit([{"params": [("a", a)]}, {"params": [("b", b), ("c", c)], "lr": torch.tensor(2e-3)}])

    first, second = build(), build()
    first.param_groups[1]["lr"].fill_(5e-3)
    train(first)
    second.load_state_dict(saved(first.state_dict()))
    assert second.param_groups[1]["param_names"] == ["b", "c"]
    assert second.param_groups[1]["lr"] == torch.tensor(5e-3)
    assert second.param_groups[1]["lr"] is not first.param_groups[1]["lr"]


def test_parameters_without_state_load() -> None:
    params = make_params()
    optimizer = optim.AdamW8bit(params)
    params[0].grad = like(params[0], 0)
    optimizer.step()
    other = optim.AdamW8bit(make_params())
    other.load_state_dict(saved(optimizer.state_dict()))
    assert [len(other.state.get(p, {})) for p in other.param_groups[0]["params"]] == [5, 0, 0]
    train(other, 1)


def test_users_hooks_still_run() -> None:
    source = optim.AdamW8bit(make_params(), lr=1e-2)
    train(source)
    target, seen = optim.AdamW8bit(make_params()), []

    def rename(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("before")
        return {"state": state_dict["theirs"], "param_groups": state_dict["param_groups"]}

    target.register_load_state_dict_pre_hook(rename)
    target.register_load_state_dict_post_hook(lambda o: seen.append(snapshot(o)["states"][0]["exp_avg"].dtype))
    foreign = source.state_dict()
    foreign["theirs"] = foreign.pop("state")
    for _ in range(2):
        target.load_state_dict(foreign)
    assert seen == ["before", torch.int8] * 2
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


@pytest.mark.filterwarnings("ignore:the state_dict is of an optimizer with other options")
@pytest.mark.parametrize(("was", "becomes"), [(8, 8), (8, 32)])
def test_codes_of_another_memory_format_are_converted(was: Any, becomes: Any) -> None:
    """As the next step would, had the state been loaded first and the parameter changed then."""
    x = hard((8, 16, 8, 8), 0)
    last = torch.nn.Parameter(x.contiguous(memory_format=torch.channels_last))
    source = optim.AdamW8bit([last], state_bits=was)
    train(source)
    state = saved(source.state_dict())
    changed, direct = (torch.nn.Parameter(last.detach().clone()) for _ in range(2))
    loaded_first = optim.AdamW8bit([changed], state_bits=becomes)
    loaded_first.load_state_dict(state)
    changed.data = changed.data.contiguous()
    direct.data = direct.data.contiguous()
    loaded_then = optim.AdamW8bit([direct], state_bits=becomes)
    loaded_then.load_state_dict(state)
    assert loaded_then.state[direct]["exp_avg"].is_contiguous()
    assert_same(train(loaded_then, 1), train(loaded_first, 1))
    assert_same(snapshot(loaded_then), snapshot(loaded_first))


@pytest.mark.parametrize("build", [optim.AdamW, optim.Lion], ids=name_of)
def test_fp32_states_move_between_memory_formats(build: type) -> None:
    x = hard((8, 16, 8, 8), 0)
    last = torch.nn.Parameter(x.contiguous(memory_format=torch.channels_last))
    source = build([last])
    train(source)
    flat = torch.nn.Parameter(last.detach().clone(memory_format=torch.contiguous_format))
    target = build([flat])
    target.load_state_dict(saved(source.state_dict()))
    assert target.state[flat]["exp_avg"].stride() == flat.stride() != last.stride()
    for optimizer in (source, target):
        train(optimizer, 2, first=3)
    assert torch.equal(flat, last)
    assert torch.equal(target.state[flat]["exp_avg"], source.state[last]["exp_avg"])


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
    "a key is missing": lambda s: s["state"][0].pop("exp_avg_scale"),
    "a key too many": lambda s: s["state"][0].update(max_exp_avg_sq=torch.ones(64, 128)),
    "last tensor, codes where its scale is missing": lambda s: s["state"][2].pop("exp_avg"),
    "block_size out of range": lambda s: s["param_groups"][0].update(block_size=12),
    "block_size of another layout": lambda s: s["param_groups"][0].update(block_size=256),
    "unknown codec": lambda s: s["param_groups"][0].update(codec="log"),
    "state_bits 4": lambda s: s["param_groups"][0].update(state_bits=4),
    "betas out of range": lambda s: s["param_groups"][0].update(betas=(0.9, 1.5)),
    "an option is missing": lambda s: s["param_groups"][0].pop("codec"),
    "a parameter fewer": lambda s: s["param_groups"][0]["params"].pop(),
    "a group more": lambda s: s["param_groups"].append({**s["param_groups"][0], "params": [3]}),
}


def assert_refused(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], match: str | None = None) -> None:
    """ValueError, and the optimizer as it was."""
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
    assert [*state_dict["state"][0]] == [*untouched["state"][0]]
    target.load_state_dict(source.state_dict())  # and it can still load what fits
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


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
    ways = {
        optim.Adam: r"memkern\.optim\.from_torch_state_dict and memkern\.optim\.from_bitsandbytes_state_dict convert",
        optim.Lion: r"memkern\.optim\.from_bitsandbytes_state_dict converts others$",
    }
    way = next((x for kind, x in ways.items() if issubclass(build, kind)), "no converter to it exists")
    for torchs in (torch.optim.AdamW, torch.optim.SGD):
        other = torchs(make_params(), lr=1e-3, **({"momentum": 0.9} if torchs is torch.optim.SGD else {}))
        train(other, 2)
        target = build(params)
        train(target, 1)
        assert_refused(target, other.state_dict(), match=f"one of memkern's {build.__name__}: .*{way}")
    assert_refused(build(params), bitsandbytes_like(params), match=way)


@pytest.mark.parametrize("build", OPTIMIZERS, ids=name_of)
@pytest.mark.parametrize("other", OPTIMIZERS, ids=name_of)
def test_states_of_each_other(build: type, other: type) -> None:
    """Adam and AdamW share a state, of any width (test_loading.py); the others' are their own."""
    source, target = other(make_params()), build(make_params())
    train(source, 1)
    if build.__name__[:3] != other.__name__[:3]:
        assert_refused(target, source.state_dict())
        return
    same = source.defaults["state_bits"] == target.defaults["state_bits"]
    decoupled = build.__name__.startswith("AdamW") and not other.__name__.startswith("AdamW")
    with nullcontext() if same and not decoupled else pytest.warns(UserWarning, match="whose own win"):
        target.load_state_dict(source.state_dict())
    if same:
        assert_same(snapshot(target)["states"], snapshot(source)["states"])
    give_gradients(target.param_groups[0]["params"], 1)
    target.step()
