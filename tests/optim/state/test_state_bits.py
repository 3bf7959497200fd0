"""``state_bits``: states of other bits are converted, and values that are not allowed."""

import copy
import re
import warnings
from typing import Any

import pytest

from memkern import optim
from memkern.optim.state import load_moment
from tests.support.helpers import assert_same, make_params, name_of, snapshot, train


@pytest.mark.parametrize("given", [8, 32])
@pytest.mark.parametrize("own", [8, 32])
@pytest.mark.parametrize("way", ["load", "change"])
def test_states_of_other_bits_are_converted(given: int, own: int, way: str) -> None:
    params = make_params([(64, 128), (38, 301)])
    source = optim.AdamW8bit(params, lr=1e-2, state_bits=given)
    train(source, 3)
    moments = [load_moment("exp_avg_sq", source.state[p]).sqrt() for p in params]
    if way == "load":
        target = optim.AdamW8bit(copy.deepcopy(params), state_bits=own)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            target.load_state_dict(source.state_dict())
        assert [str(w.message) for w in said if "state_bits" in str(w.message)] == (
            []
            if own == given
            else [
                "the state_dict is of an optimizer with other options than this AdamW8bit, whose own win; the state "
                f"was converted: group 0: state_bits {given} -> {own}"
            ]
        )
    else:
        target = source
        target.param_groups[0]["state_bits"] = own
        target.state_dict()  # converts
    group = target.param_groups[0]
    assert group["state_bits"] == own
    for p, w in zip(group["params"], moments, strict=True):
        state = target.state[p]
        fresh = optim.AdamW8bit([p], state_bits=own)._init_state(p, group)
        assert {k: (x.shape, x.dtype) for k, x in state.items()} == {k: (x.shape, x.dtype) for k, x in fresh.items()}
        found = load_moment("exp_avg_sq", state).sqrt()
        # A dithered code of w at the largest is 2 / N of it.
        limit = {8: 2.01 / 255, 32: 1e-6}[own] * w.amax(1, keepdim=True)
        assert ((found - w).abs() <= limit).all()
    train(target, 1)


@pytest.mark.parametrize("build", [optim.AdamW, optim.Adam8bit, optim.Lion, optim.LAMB8bit], ids=name_of)
@pytest.mark.parametrize("given", [4, 16, "8", (8, 4), [8, 4], (8,), None], ids=str)
def test_bad_values(build: type, given: Any) -> None:
    message = f"state_bits must be 8 or 32, got {given!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(make_params(), state_bits=given)


@pytest.mark.parametrize("of", ["the group", "a file"])
def test_4_bits_are_refused_before_anything_is_changed(of: str) -> None:
    optimizer = optim.AdamW8bit(make_params())
    train(optimizer, 1)
    state, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    target = optimizer.param_groups[0] if of == "the group" else state["param_groups"][0]
    target["state_bits"] = (8, 4)
    with pytest.raises(ValueError, match=r"state_bits must be 8 or 32, got \(8, 4\)"):
        optimizer.step() if of == "the group" else optimizer.load_state_dict(state)
    optimizer.param_groups[0]["state_bits"] = 8
    assert_same(snapshot(optimizer), before)
