"""memkern.plan(devices=n) predicts each device's bytes under fully_shard. Real steps: lab/studies/plan_shards.py."""

from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.memory import Storage
from memkern.planner.hardware import DEFAULTS
from memkern.planner.shards import ShardedWeights
from memkern.planner.trace import Trace
from memkern.techniques.options import OptionError, Techniques
from tests.support.planned_models import predictor_of

WIDTH, DEPTH = 30, 3
INPUTS = torch.zeros(2, WIDTH)


def model() -> nn.Module:
    """Three blocks, and a head outside of them."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 5, bias=False))


def test_a_device_holds_its_rows_and_what_is_gathered() -> None:
    static_bytes = predictor_of(model(), INPUTS, devices=4).static_bytes(Techniques())
    block, head = 8 * WIDTH + 8, 2 * WIDTH  # elements of the first device: 8 of 30 rows and biases, 2 of 5 rows
    assert static_bytes.count == DEPTH * WIDTH * (WIDTH + 1) + 5 * WIDTH
    assert static_bytes.parameters == static_bytes.gradients == 4 * (DEPTH * block + head)
    # Two fp32 moments, and an fp32 step counter for each tensor.
    assert static_bytes.optimizer == 8 * (DEPTH * block + head) + 4 * (2 * DEPTH + 1)
    assert (static_bytes.block, static_bytes.outside_blocks) == (4 * 4 * block, 4 * 4 * head)


def test_what_is_gathered_in_each_part_of_a_step() -> None:
    operators: list[Any] = [("op",)] * 12
    # Forward: an operator, two blocks of two, one of the loss. Backward: the loss, two blocks of two, the rest.
    trace = Trace([], {}, operators, 6, block_clocks=((1, 11), (3, 9)))
    levels = ShardedWeights(root=100, block=1, root_shard=50).extra_bytes(trace)
    forward = [100, 100, 102, 102, 102, 102, 101]
    backward = [101, 103, 103, 103, 103, 150]  # at the end, the root's part beside two copies of its gradients
    assert levels == forward + backward
    assert set(ShardedWeights(100, 1).extra_bytes(Trace([], {}, operators, 6))) == {104}


def test_gradients_of_blocks_are_reduced_when_the_block_ends() -> None:
    gradient, operators = Storage(64, 3), [("op",)] * 10
    trace = Trace([gradient], {gradient: 5}, operators, 2, block_ends={gradient: 8})
    levels = trace.live_bytes(free_gradients=False, unit=1, devices=2)["gradients"]
    assert levels == [0] * 5 + [64] * 4 + [32] * 2
    predictors = [predictor_of(model(), INPUTS, devices=n) for n in (1, 3)]
    single, sharded = (each.predict(Techniques(micro_batch=50)) for each in predictors)
    assert sharded.phases["step"] < single.phases["step"] / 2 + DEFAULTS["cpu"].process
    static_bytes = predictors[1].static_bytes(Techniques())
    assert sharded.categories["temporaries"] >= static_bytes.outside_blocks + static_bytes.block


@pytest.mark.parametrize(
    ("techniques", "name"),
    [
        ({"loss_chunk": 8}, "loss_chunk"),
        ({"checkpointing": "blocks", "checkpoint_every": 2}, "checkpoint_every"),
        ({"optimizer": "muon"}, "optimizer"),
        ({"compile": True}, "compile"),
        ({"weights_on_host": "layers"}, "weights_on_host"),
    ],
)
def test_what_is_not_counted_with_shards_is_refused(techniques: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}.* with devices above 1"):
        memkern.plan(model(), memory="4GiB", inputs=INPUTS, device="cpu", devices=2, techniques=techniques)


def test_a_plan_for_several_devices_says_so() -> None:
    plan = memkern.plan(model(), memory="4GiB", inputs=INPUTS, device="cpu", devices=2)
    assert plan.devices == 2
    assert "on each of 2 devices with fully_shard" in str(plan)
    assert "fully_shard(module)" in plan.code()
    assert not {"states on the host", "loss in chunks", "step in backward"} & plan.alone.keys()
    assert plan.recommended is not None
    assert not plan.recommended.techniques.step_in_backward
