"""State dicts of bitsandbytes are converted to memkern's: written by hand, and by bitsandbytes where installed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import _ops, optim
from memkern.optim.format import takes_8bit_state
from memkern.quant.codec import dynamic_map, dynamic_zero
from tests.support.convert_helpers import (
    DROP,
    HYPER,
    SAME_BLOCKS,
    SHAPES,
    State,
    assert_steps_agree,
    copies_of,
    over_options,
    parameters,
    train,
    value,
    with_value_at,
)
from tests.support.helpers import assert_same


def make_bnb_state(params: list[nn.Parameter], names: tuple[str, ...], wrapped: bool, block: int = 256) -> State:
    """A state dict as bitsandbytes writes it, with random codes.

    names: of memkern's moments; wrapped: whether quantized states are in a dict inside each state; block: elements.
    """
    generator = torch.Generator().manual_seed(1)
    state: State = {}
    for i, p in enumerate(params):
        quant: State = {}
        for slot, _ in zip("12", names, strict=False):
            if p.numel() < 4096:
                quant[f"state{slot}"] = torch.rand(p.shape, generator=generator)
                continue
            quant[f"state{slot}"] = torch.randint(256, p.shape, generator=generator, dtype=torch.uint8)
            quant[f"qmap{slot}"] = torch.tensor(dynamic_map(slot == "1"))
            quant[f"absmax{slot}"] = torch.rand(-(-p.numel() // block), generator=generator) + 0.1
        state[i] = {"step": 7, **({"__bnb_optimizer_quant_state__": quant} if wrapped else quant)}
    adam = {"alpha": 0.0, "t_alpha": None, "t_beta3": None} if len(names) == 2 else {}
    group = {**HYPER, **adam, "eps": HYPER["eps"] if adam else 0.0, "params": [*range(len(params))]}
    return {"state": state, "param_groups": [group]}


def unwrapped(state: State) -> State:
    """A parameter's state without the dict inside."""
    flat = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
    flat.pop("__bnb_optimizer_quant_state__", None)
    return flat


def bnb_value(state: State, slot: str, block: int = 256) -> Tensor:
    """A moment of bitsandbytes as floats. slot: "1" or "2", of state1 or state2."""
    quant = unwrapped(state)
    codes = quant[f"state{slot}"]
    if codes.dtype != torch.uint8:
        return codes
    scale = quant[f"absmax{slot}"].repeat_interleave(block)[: codes.numel()]
    return (quant[f"qmap{slot}"][codes.long().reshape(-1)] * scale).reshape(codes.shape)


# class: its moments, state1 and state2 of bitsandbytes
KINDS = {
    "AdamW8bit": ("exp_avg", "exp_avg_sq"),
    "Adam8bit": ("exp_avg", "exp_avg_sq"),
    "Lion8bit": ("exp_avg",),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_from_bitsandbytes_moves_codes_where_the_blocks_are_the_same(kind: str, wrapped: bool) -> None:
    names = KINDS[kind]
    params = parameters()
    bnb_state = make_bnb_state(params, names, wrapped)
    before = copy.deepcopy(bnb_state)
    ours = getattr(optim, kind)(params, codec="dynamic", block_size=256)
    torch.set_default_dtype(torch.bfloat16 if wrapped else torch.float32)  # no matter which
    try:
        converted = optim.from_bitsandbytes_state_dict(ours, bnb_state)
    finally:
        torch.set_default_dtype(torch.float32)
    ours.load_state_dict(converted)
    (group,) = ours.param_groups
    for i, (shape, p) in enumerate(zip(SHAPES, params, strict=True)):
        for slot, name in zip("12", names, strict=False):
            state, truth = ours.state[p], bnb_value(bnb_state["state"][i], slot)
            if shape in SAME_BLOCKS:
                quant = unwrapped(bnb_state["state"][i])
                zero = dynamic_zero(slot == "1")
                assert torch.equal(state[name].view(torch.uint8) + zero, quant[f"state{slot}"])
                assert torch.equal(state[f"{name}_scale"].reshape(-1), quant[f"absmax{slot}"])
                assert torch.equal(value(state, name, group), truth)
            else:
                expected = torch.empty_like(p).copy_(truth).detach()
                if takes_8bit_state(p, group):
                    codes, scale = _ops.quantize_blockwise(expected, "dynamic", slot == "1", 256, 7)
                    assert torch.equal(state[name], codes)
                    assert torch.equal(state[f"{name}_scale"], scale)
                else:
                    assert torch.equal(state[name], expected)
        assert ours.state[p]["step"] == 7
    assert (group["lr"], group["betas"], group["weight_decay"]) == (HYPER["lr"], HYPER["betas"], 0.1)
    assert {*group} == {*type(ours)(copies_of(params)).param_groups[0]}
    if kind != "Lion8bit":
        assert group["eps"] == HYPER["eps"]
        assert group["decoupled_weight_decay"] is True
    assert_same(bnb_state, before)


@over_options
def test_from_bitsandbytes_requantizes_for_other_codecs_and_blocks(options: State) -> None:
    params = parameters()
    bnb_state = make_bnb_state(params, ("exp_avg", "exp_avg_sq"), wrapped=True)
    ours = optim.AdamW(params, **options)
    ours.load_state_dict(optim.from_bitsandbytes_state_dict(ours, bnb_state))
    (group,) = ours.param_groups
    for i, p in enumerate(params):
        for slot, name in zip("12", KINDS["AdamW8bit"], strict=True):
            x, truth = value(ours.state[p], name, group), bnb_value(bnb_state["state"][i], slot)
            if ours.state[p][name].dtype == torch.float32:
                assert torch.equal(x, truth)
                continue
            assert ours.state[p][name].stride() == p.stride()
            # Gaps of the power codes around t are 2 sqrt(t) / N, where N is 127 or 255: up to 0.016, also of v, whose
            # root is stored. Gaps of the dynamic map are up to 0.014.
            error = (x - truth).abs().max() / truth.abs().max()
            assert error < (0.02 if group["codec"] == "power" else 0.04)


def test_old_blocks_of_2048_and_foreign_maps_are_decoded() -> None:
    params = [nn.Parameter(torch.randn(20, 512))]
    ours = optim.Lion(params)
    bnb_state = make_bnb_state(params, ("exp_avg",), wrapped=False, block=2048)
    converted = optim.from_bitsandbytes_state_dict(ours, bnb_state)
    assert torch.equal(converted["state"][0]["exp_avg"], bnb_value(bnb_state["state"][0], "1", 2048))
    exchanging = optim.Lion8bit(params, codec="dynamic", block_size=256)
    bnb_state = make_bnb_state(params, ("exp_avg",), wrapped=False)
    bnb_state["state"][0]["qmap1"] = torch.linspace(-1, 1, 256)
    converted = optim.from_bitsandbytes_state_dict(exchanging, bnb_state)
    x = value(converted["state"][0], "exp_avg", exchanging.param_groups[0])
    assert not torch.equal(x, bnb_value(bnb_state["state"][0], "1"))
    torch.testing.assert_close(x, bnb_value(bnb_state["state"][0], "1"), atol=0.05, rtol=0)


# ---- bitsandbytes itself


@pytest.fixture(scope="module")
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes").optim


def bnb_pair(bnb: Any, kind: str, params: list[nn.Parameter], **options: Any) -> tuple[Any, Any]:
    """bitsandbytes' optimizer of the parameters, and memkern's of copies of them."""
    hyper = {k: v for k, v in HYPER.items() if k != "eps" or kind != "Lion8bit"}
    if kind == "Adam8bit":
        options["decoupled_weight_decay"] = True  # what bitsandbytes' Adam does
    return getattr(bnb, kind)(params, **hyper), getattr(optim, kind)(copies_of(params), **hyper, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanged", [True, False], ids=["exchanged", "requantized"])
def test_training_goes_on_from_bitsandbytes(bnb: Any, kind: str, exchanged: bool) -> None:
    torch.manual_seed(0)
    shapes = [s for s in SHAPES if s in SAME_BLOCKS or s == "bias"]
    params = [nn.Parameter(SHAPES[s]()) for s in shapes]
    options: State = {"codec": "dynamic", "block_size": 256} if exchanged else {"state_bits": 32}
    theirs, _ = bnb_pair(bnb, kind, params)
    train(theirs, params, 5)
    ours = getattr(optim, kind)(copies_of(params), **options)
    copies = ours.param_groups[0]["params"]
    ours.load_state_dict(optim.from_bitsandbytes_state_dict(ours, theirs.state_dict()))
    for i, p in enumerate(copies):
        for slot, name in zip("12", KINDS[kind], strict=False):
            expected = bnb_value(theirs.state_dict()["state"][i], slot)
            assert torch.equal(value(ours.state[p], name, ours.param_groups[0]), expected)
    assert_steps_agree(theirs, params, ours, copies)
    if not exchanged:
        return
    # The states after one more step of both. bitsandbytes' CPU encoder takes a neighbour of the nearest entry for
    # 0.1 % of m and 3 % of v, so that codes are close, not equal.
    after = optim.from_bitsandbytes_state_dict(ours, theirs.state_dict())["state"]
    (group,) = ours.param_groups
    for i, p in enumerate(copies):
        for name in KINDS[kind]:
            x, y = value(ours.state[p], name, group), value(after[i], name, group)
            if takes_8bit_state(p, group):
                assert ((x - y).abs() > 1e-6 * x.abs()).float().mean() <= 0.05
                assert (x - y).abs().max() <= 0.02 * x.abs().max()
            else:
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


# ---- errors

G, S = "param_groups", "state"  # of a state dict
MATRIX = torch.zeros(96, 64)
# name: the place in the state dict, the value put there (DROP: none), the error and its message
ERRORS: dict[str, tuple[tuple[Any, ...], Any, type[Exception], str]] = {
    "no state2": ((S, 0, "state2"), DROP, ValueError, r"\[0\] must have state2"),
    "no map": ((S, 0, "qmap1"), DROP, ValueError, r"must have qmap1"),
    "no scale": ((S, 0, "absmax2"), DROP, ValueError, r"must have absmax2"),
    "scales": ((S, 0, "absmax1"), torch.ones(5), ValueError, r"absmax1 of 24.*got \(256,\) and \(5,\)"),
    "map": ((S, 0, "qmap1"), torch.ones(16), ValueError, r"got \(16,\)"),
    "no step": ((S, 0, "step"), DROP, ValueError, "must have step"),
    "shape": ((S, 0, "state1"), MATRIX[None], ValueError, r"got \(1, 96, 64\)"),
    "dtype": ((S, 0, "state1"), MATRIX.int(), TypeError, r"got torch\.int32"),
    "order": ((S, 0, "state1"), torch.zeros(64, 96).t(), ValueError, "not contiguous"),
    "no betas": ((G, 0, "betas"), DROP, ValueError, r"param_groups.*must have betas"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_states_are_refused(case: str) -> None:
    path, wrong, error, message = ERRORS[case]
    params = [nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(5))]
    ours = optim.AdamW8bit(params)
    bnb_state = make_bnb_state(params, KINDS["AdamW8bit"], wrapped=False)
    with pytest.raises(error, match=message):
        optim.from_bitsandbytes_state_dict(ours, with_value_at(bnb_state, path, wrong))
    assert not ours.state


def test_optimizers_and_states_of_another_kind_are_refused() -> None:
    params = [nn.Parameter(torch.randn(96, 64))]
    adam, lion, theirs = optim.AdamW8bit(params), optim.Lion8bit(params), torch.optim.AdamW(params)
    bnb_state = make_bnb_state(params, KINDS["AdamW8bit"], wrapped=True)
    message = r"must be a memkern\.optim\.Adam or memkern\.optim\.Lion, got torch\.optim\.adamw\.AdamW"
    with pytest.raises(TypeError, match=message):
        optim.from_bitsandbytes_state_dict(theirs, bnb_state)
    with pytest.raises(ValueError, match="has state2, a second moment, which Lion8bit does not have"):
        optim.from_bitsandbytes_state_dict(lion, bnb_state)
    with pytest.raises(ValueError, match="must have exp_avg, exp_avg_sq, got only step"):
        optim.from_torch_state_dict(adam, bnb_state)
    train(theirs, params, 1)
    with pytest.raises(ValueError, match="must have state1, state2, got only step, exp_avg"):
        optim.from_bitsandbytes_state_dict(adam, theirs.state_dict())
