"""SGD's own: what it shares with LARS, and an option that a state_dict changes."""

from typing import Any

import pytest
import torch

from memkern import optim
from tests.support.helpers import assert_same, hard, make_params, on, over_cpu, snapshot, train


@over_cpu
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.5}, {"state_bits": 32}], ids=str)
def test_classic_lars_without_ratios_has_the_same_bits(backend: str, options: dict[str, Any]) -> None:
    runs = []
    for build, own in ((optim.SGD8bit, {"momentum": 0.9}), (optim.LARS8bit, {"trust_coeff": 1.0})):
        p = torch.nn.Parameter(hard((40, 300), 0))
        optimizer = build([p], lr=0.1, weight_decay=0.0, min_8bit_size=0, **options, **own)
        with on(backend):
            for step in range(4):
                p.grad = hard(p.shape, 1 + step)
                optimizer.step()
        state = optimizer.state[p]
        runs.append([p.detach(), *(x for key, x in state.items() if key != "trust_ratio")])
    assert_same(*runs)


def test_8_bits_are_a_quarter_of_torchs_buffer() -> None:
    p = torch.nn.Parameter(torch.randn(1024, 128))
    p.grad = torch.randn_like(p)
    optimizer = optim.SGD8bit([p])
    optimizer.step()
    state = optimizer.state[p]
    assert [*state] == ["momentum_buffer", "momentum_buffer_scale", "step"]
    assert state["momentum_buffer"].dtype == torch.int8
    assert sum(x.nbytes for x in state.values()) == p.numel() * (1 + 4 / 128) + 4


def test_a_changed_option_is_checked_at_the_next_step() -> None:
    optimizer = optim.SGD8bit(make_params())
    train(optimizer, 1)
    before = snapshot(optimizer)
    state = optimizer.state_dict()
    state["param_groups"][0]["momentum"] = 2.0
    with pytest.raises(ValueError, match=r"momentum must be from 0 to below 1, got 2\.0"):
        optimizer.load_state_dict(state)
    assert_same(snapshot(optimizer), before)
