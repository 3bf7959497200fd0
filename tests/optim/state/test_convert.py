"""State dicts of torch.optim are converted to memkern's and back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim, quantize_blockwise
from memkern.optim.format import takes_8bit_state
from tests.support.convert_helpers import (
    DROP,
    HYPER,
    State,
    assert_steps_agree,
    copies_of,
    give_gradients,
    over_options,
    parameters,
    train,
    value,
    with_value_at,
)
from tests.support.helpers import assert_same


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "capturable", "plain"])
def test_from_torch_to_32_bits_is_exact(kind: str, implementation: str) -> None:
    params = parameters()
    flags = {} if implementation == "plain" else {implementation: True}
    if implementation == "capturable":
        flags = {}  # torch refuses a capturable step on the CPU: the flag is set in the state dict below
    theirs = getattr(torch.optim, kind)(params, **HYPER, **flags)
    train(theirs, params, 3)
    saved = theirs.state_dict()
    if implementation == "capturable":
        saved["param_groups"][0]["capturable"] = True
    copies = copies_of(params)
    ours = getattr(optim, kind)(copies)
    ours.load_state_dict(optim.from_torch_state_dict(ours, saved))
    for p, q in zip(params, copies, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[q][name], theirs.state[p][name])
            assert ours.state[q][name].stride() == q.stride()
        assert ours.state[q]["step"] == 3
        assert ours.state[q]["step"].dtype == torch.float32
    group = ours.param_groups[0]
    assert {k: group[k] for k in HYPER} == HYPER
    assert group["decoupled_weight_decay"] == (kind == "AdamW")
    assert {*group} == {*type(ours)(copies_of(params)).param_groups[0]}
    assert_steps_agree(theirs, params, ours, copies)


@over_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_torch_stores_what_the_optimizer_would(options: State, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    theirs = torch.optim.AdamW(params, **HYPER)
    train(theirs, params, 5)
    ours = optim.AdamW(copies_of(params), **options)
    ours.load_state_dict(optim.from_torch_state_dict(ours, theirs.state_dict()))
    (group,) = ours.param_groups
    for p, q in zip(params, group["params"], strict=True):
        state = ours.state[q]
        coded = takes_8bit_state(q, group)
        assert state["exp_avg"].dtype == (torch.int8 if coded else torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            x = torch.empty_like(q, dtype=torch.float32).copy_(theirs.state[p][name]).detach()
            assert state[name].stride() == q.stride()
            if not coded:
                assert torch.equal(state[name], x)
                continue
            rooted = name == "exp_avg_sq" and group["codec"] == "power"
            codes, scale = quantize_blockwise(
                x.double().sqrt().float() if rooted else x,
                codec=group["codec"],
                signed=name == "exp_avg",
                block_size=group["block_size"],
                step=5 if group["codec"] == "power" else None,
            )
            assert torch.equal(state[name], codes)
            assert torch.equal(state[f"{name}_scale"], scale)


def sorted_states(state_dict: State) -> list[State]:
    """The states by parameter, each with its entries in alphabetical order."""
    return [dict(sorted(state.items())) for state in state_dict["state"].values()]


@over_options
def test_states_converted_to_torch_and_back_are_the_same(options: State) -> None:
    params = parameters()
    ours = optim.AdamW(params, **HYPER, **options)
    train(ours, params, 4)
    before = copy.deepcopy(ours.state_dict())
    converted = optim.to_torch_state_dict(ours)
    copies = copies_of(params)
    theirs = torch.optim.AdamW(copies)
    theirs.load_state_dict(converted)
    (group,) = ours.param_groups
    for p, q in zip(params, copies, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert theirs.state[q][name].dtype == torch.float32
            assert torch.equal(theirs.state[q][name], value(ours.state[p], name, group))
            assert theirs.state[q][name].stride() == q.stride()
        assert theirs.state[q]["step"] == 4
    assert {*theirs.param_groups[0]} == {*torch.optim.AdamW(copies_of(params)).param_groups[0]}
    assert_same(before, ours.state_dict())
    back = optim.from_torch_state_dict(ours, theirs.state_dict())["state"]
    if options["state_bits"] == 32:
        assert_same(sorted_states({"state": back}), sorted_states(before))
    for i, p in enumerate(params):
        if not takes_8bit_state(p, group):
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            # A block whose largest code stands for less than its scale (the dynamic map has no -1) gets a smaller
            # scale, and the dither may move a root that is exactly a code to the next one.
            equal_share = (back[i][name] == ours.state[p][name]).float().mean()
            is_exact = name == ("exp_avg" if group["codec"] == "power" else "exp_avg_sq")
            assert equal_share == 1 if is_exact else equal_share > 0.7
            x, truth = value(back[i], name, group), value(ours.state[p], name, group)
            assert (x - truth).abs().max() <= 0.03 * truth.abs().max()  # a code's neighbour
    assert_steps_agree(ours, params, theirs, copies)


def test_torchs_adam_gets_bf16_states_and_coupled_decay() -> None:
    params = parameters(torch.bfloat16)
    ours = optim.Adam(params, **HYPER)
    train(ours, params, 3)
    copies = copies_of(params)
    theirs = torch.optim.Adam(copies)
    theirs.load_state_dict(optim.to_torch_state_dict(ours))
    assert theirs.param_groups[0]["decoupled_weight_decay"] is False
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(theirs.state[q]["exp_avg"], ours.state[p]["exp_avg"].bfloat16())
    train(theirs, copies, 1)


def test_groups_keep_their_own_options_and_take_the_states_hyperparameters() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(
        [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "weight_decay": 0.25, "maximize": True}],
        lr=torch.tensor(0.125),
    )
    torch.optim.lr_scheduler.LinearLR(theirs)
    train(theirs, params, 2)
    copies = copies_of(params)
    ours = optim.AdamW8bit(
        [
            {"params": copies[:3], "block_size": 64},
            {"params": copies[3:], "codec": "dynamic", "min_8bit_size": 0},
        ]
    )
    ours.load_state_dict(optim.from_torch_state_dict(ours, theirs.state_dict()))
    a, b = ours.param_groups
    assert (a["block_size"], a["codec"], b["codec"], b["min_8bit_size"]) == (64, "power", "dynamic", 0)
    assert (a["initial_lr"], a["maximize"], b["maximize"], b["weight_decay"]) == (0.5, False, True, 0.25)
    assert b["lr"] == theirs.param_groups[1]["lr"]
    assert ours.state[copies[-1]]["exp_avg"].dtype == torch.int8
    back = optim.to_torch_state_dict(ours)
    assert [g["params"] for g in back["param_groups"]] == [[0, 1, 2], [*range(3, len(params))]]
    assert back["param_groups"][0]["initial_lr"] == 0.5


def test_parameters_without_a_state_stay_without() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params)
    ours = optim.AdamW8bit(params)
    assert optim.from_torch_state_dict(ours, theirs.state_dict())["state"] == {}
    assert optim.to_torch_state_dict(ours)["state"] == {}
    give_gradients(params, 0)
    params[0].grad = None
    theirs.step()
    converted = optim.from_torch_state_dict(ours, theirs.state_dict())
    assert [*converted["state"]] == [*range(1, len(params))]
    ours.load_state_dict(converted)
    assert [*optim.to_torch_state_dict(ours)["state"]] == [*range(1, len(params))]
    assert params[0] not in ours.state


def test_conversions_share_no_memory_and_change_no_optimizer() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params)
    train(theirs, params, 1)
    torch_state = theirs.state_dict()
    before = copy.deepcopy(torch_state)
    for options in ({"state_bits": 32}, {"state_bits": 8}):
        ours = optim.AdamW(copies_of(params), **options)
        converted = optim.from_torch_state_dict(ours, torch_state)
        for state in converted["state"].values():
            for tensor in state.values():
                tensor.fill_(77)
        assert not ours.state
        ours.load_state_dict(optim.from_torch_state_dict(ours, torch_state))
        unchanged = copy.deepcopy(ours.state_dict())
        for state in optim.to_torch_state_dict(ours)["state"].values():
            for tensor in state.values():
                tensor.fill_(77)
        assert_same(ours.state_dict(), unchanged)
    assert_same(torch_state, before)


def test_amsgrad_states_are_converted_both_ways() -> None:
    params = [nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(5))]
    theirs, copies = torch.optim.AdamW(params, amsgrad=True), copies_of(params)
    train(theirs, params, 3)
    for p, q in zip(copies, params, strict=True):
        p.data.copy_(q.data)
    ours = optim.AdamW(copies)
    ours.load_state_dict(optim.from_torch_state_dict(ours, theirs.state_dict()))
    assert ours.param_groups[0]["amsgrad"] is True
    for p, q in zip(copies, params, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert torch.equal(ours.state[p][name], theirs.state[q][name])
    back = torch.optim.AdamW(copies_of(params))
    back.load_state_dict(optim.to_torch_state_dict(ours))
    assert back.param_groups[0]["amsgrad"] is True
    assert_same(back.state_dict()["state"], theirs.state_dict()["state"])


# ---- exports between a change of the groups and the next step

# name: class, what exports the optimizer's states
EXPORTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (optim.AdamW8bit, lambda o: optim.to_torch_state_dict(o)["state"]),
    "trust ratios": (optim.LAMB8bit, lambda o: o.trust_ratios()),
}


def step_once(build: Any, **options: Any) -> tuple[nn.Linear, Any]:
    """A bf16 model and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False).bfloat16()
    optimizer = build(model.parameters(), lr=1e-2, **options)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    return model, optimizer


def replace(model: nn.Linear, optimizer: Any) -> None:
    """Puts a copy of the weight into the model and the group, as a wrapper does."""
    model.weight = nn.Parameter(model.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = model.weight


@pytest.mark.parametrize("name", EXPORTS)
def test_the_state_of_a_replaced_parameter_is_exported(name: str) -> None:
    build, export = EXPORTS[name]
    model, optimizer = step_once(build, min_8bit_size=0)
    expected = export(optimizer)
    replace(model, optimizer)
    old = [*optimizer.state]
    assert_same(export(optimizer), expected)
    assert [*optimizer.state] == old  # nothing of the optimizer is changed


def fp32_weight(model: nn.Module, optimizer: Any) -> Tensor:
    return optim.to_fp32_state_dict(model, optimizer)["weight"]


@pytest.mark.parametrize("master_weights", ["bf16+8", "bf16+16"])
def test_a_replaced_parameter_has_the_fp32_weights_of_the_old_one(master_weights: str) -> None:
    model, optimizer = step_once(optim.AdamW8bit, master_weights=master_weights)
    expected = fp32_weight(model, optimizer).clone()
    assert not torch.equal(expected, model.weight.float())
    replace(model, optimizer)
    assert torch.equal(fp32_weight(model, optimizer), expected)
    new = expected * 1.001
    optim.load_fp32_state_dict(model, optimizer, {"weight": new})
    (state,) = optimizer.state_dict()["state"].values()
    assert int(state["step"]) == 1  # moments and counter are the old parameter's
    rtol = 0 if master_weights == "bf16+16" else 2.0**-16
    torch.testing.assert_close(fp32_weight(model, optimizer), new, rtol=rtol, atol=0)


def test_fp32_weights_are_loaded_into_an_option_that_was_set_since_the_step() -> None:
    model, optimizer = step_once(optim.AdamW8bit)
    optimizer.param_groups[0]["master_weights"] = "bf16+16"
    new = model.weight.detach().float() * 1.001
    optim.load_fp32_state_dict(model, optimizer, {"weight": new})
    assert torch.equal(fp32_weight(model, optimizer), new)


@pytest.mark.parametrize("mode", [{}, {"offload_gradients": True}])
def test_the_inner_optimizer_has_the_groups_options(mode: dict[str, bool]) -> None:
    _, optimizer = step_once(lambda params, **options: optim.HostOffload(optim.AdamW8bit, params, **mode, **options))
    optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does after the step
    assert optim.to_torch_state_dict(optimizer.inner)["param_groups"][0]["lr"] == 0.25


# ---- errors

G, S = "param_groups", "state"  # of a state dict
MATRIX = torch.zeros(96, 64)
# name: the place in the state dict, the value put there (DROP: none), the error and its message
ERRORS: dict[str, tuple[tuple[Any, ...], Any, type[Exception], str]] = {
    "amsgrad": ((G, 0, "amsgrad"), True, ValueError, r"\[0\] has amsgrad=True"),
    "groups": ((G,), [{"params": [0]}, {"params": [1]}], ValueError, r"groups of \[2\].*got \[1, 1\]"),
    "no lr": ((G, 0, "lr"), DROP, ValueError, r"param_groups.*must have lr"),
    "no moment": ((S, 1, "exp_avg"), DROP, ValueError, r"\[1\] must have exp_avg, got only"),
    "shape": ((S, 0, "exp_avg"), MATRIX[:3], ValueError, r"shape \(96, 64\), got \(3, 64\)"),
    "dtype": ((S, 0, "exp_avg"), MATRIX.to(torch.int8), TypeError, r"got torch\.int8"),
    "no tensor": ((S, 0, "exp_avg_sq"), 3, TypeError, r"'exp_avg_sq'.*got int"),
    "negative": ((S, 0, "exp_avg_sq"), MATRIX - 1, ValueError, "negative"),
    "step": ((S, 0, "step"), torch.tensor(-1.0), ValueError, "whole number"),
    "half a step": ((S, 0, "step"), 1.5, ValueError, "whole number"),
    "stranger": ((S, 9), {}, ValueError, r"no parameter: \[9\]"),
    "no state": ((S,), DROP, TypeError, "with state and param_groups"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_states_are_refused(case: str) -> None:
    path, wrong, error, message = ERRORS[case]
    params = [nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(5))]
    theirs = torch.optim.AdamW(params)
    train(theirs, params, 1)
    ours = optim.AdamW8bit(params)
    with pytest.raises(error, match=message):
        optim.from_torch_state_dict(ours, with_value_at(theirs.state_dict(), path, wrong))
    assert not ours.state


def test_states_with_more_entries_than_adams_are_refused() -> None:
    """NAdam's states have mu_product beside Adam's two moments; a wrapper may add an entry to Adam's own."""
    for cls in (torch.optim.NAdam, torch.optim.Adam):
        model = torch.nn.Linear(8, 8)
        theirs = cls(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        theirs.step()
        ours = optim.AdamW8bit(model.parameters())
        if cls is torch.optim.Adam:
            theirs.state[model.weight]["slow_buffer"] = torch.zeros(8, 8)
        extra = "mu_product" if cls is torch.optim.NAdam else "slow_buffer"
        with pytest.raises(ValueError, match=rf"must be of torch\.optim\.Adam or AdamW, .* got {extra} too"):
            optim.from_torch_state_dict(ours, theirs.state_dict())


def test_states_of_radam_with_adams_entries_are_refused() -> None:
    params = [nn.Parameter(torch.randn(96, 64))]
    theirs = torch.optim.RAdam(params)
    train(theirs, params, 1)
    with pytest.raises(ValueError, match="Adam or AdamW, whose groups have amsgrad, got"):
        optim.from_torch_state_dict(optim.AdamW8bit(params), theirs.state_dict())


def test_optimizers_and_states_of_another_kind_are_refused() -> None:
    params = [nn.Parameter(torch.randn(96, 64))]
    adam, lion, theirs = optim.AdamW8bit(params), optim.Lion8bit(params), torch.optim.AdamW(params)
    with pytest.raises(TypeError, match=r"must be a memkern\.optim\.Adam, got torch\.optim\.adamw\.AdamW"):
        optim.from_torch_state_dict(theirs, theirs.state_dict())
    for convert in (lambda o: optim.from_torch_state_dict(o, theirs.state_dict()), optim.to_torch_state_dict):
        with pytest.raises(TypeError, match=r"must be a memkern\.optim\.Adam, got .*Lion8bit"):
            convert(lion)
    train(adam, params, 1)
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int8"):
        optim.from_torch_state_dict(adam, adam.state_dict())
