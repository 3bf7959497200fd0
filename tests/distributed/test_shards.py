"""Optimizers of sharded parameters give the bits of one process, or its losses where torch reduces gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from memkern import optim, report
from memkern.train.distributed import full
from tests.support import sharded
from tests.support.helpers import assert_same
from tests.support.ranks import Ranks
from tests.support.sharded import (
    Odd,
    full_params_and_states,
    gpt,
    in_shards,
    mesh,
    muon_groups,
    new_muon,
    run_in_one_process,
    steps,
)

# name: class, options
LAYERWISE = {
    "LAMB8bit": (optim.LAMB8bit, {}),
    "LAMB decoupled, clipped": (optim.LAMB, {"decoupled_decay": True, "trust_clip": True}),
    "LARS8bit, bounds on norms": (optim.LARS8bit, {"weight_decay": 1e-2, "trust_bounds": (0.5, 2.0)}),
    "LARS8bit classic": (optim.LARS8bit, {"trust_coeff": 1e-2, "nesterov": True}),
    "LAMB8bit, a ratio per row": (optim.LAMB8bit, {"layers": "rows", "block_size": 8}),
}


class OddBF16(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


def run_sharded(sizes: tuple[int, ...], build: Any, new: Any, options: dict[str, Any], count: int) -> Any:
    """Parameters and states after ``count`` steps of the model ``build()``, sharded over a mesh of these sizes."""
    model = in_shards(build(), mesh=mesh(*sizes))
    optimizer = new(model.parameters(), **options)
    steps(model, optimizer, 0, count)
    return full_params_and_states(model, optimizer)


MANY_STEPS = pytest.mark.feature("torch", "`fully_shard` on 2 and 3 processes: 200 steps with the bits of one process")
HSDP = pytest.mark.feature("torch", "HSDP, two replicas of two shards: bits of one process")
DECAY: dict[str, Any] = {"min_8bit_size": 0, "weight_decay": 0.1}
BLOCKS_OF_64 = {"min_8bit_size": 0, "block_size": 64}
# sizes of the mesh, model, optimizer, options, steps
BIT_CASES: list[Any] = [
    pytest.param((2,), Odd, optim.AdamW8bit, DECAY, 3),
    *(
        pytest.param((world,), build, new, DECAY | options, count, marks=[pytest.mark.full, MANY_STEPS])
        for world, new in ((2, optim.AdamW8bit), (3, optim.Lion8bit))
        for build, options, count in ((gpt, {"min_8bit_size": 4096}, 200), (Odd, {}, 30))
    ),
    *(
        pytest.param((2, 2), Odd, new, BLOCKS_OF_64 | {"codec": codec}, 3, marks=[pytest.mark.full, HSDP])
        for new, codec in ((optim.Adam8bit, "power"), (optim.AdamW, "power"), (optim.Lion8bit, "dynamic"))
    ),
    *(
        pytest.param((2,), OddBF16, new, {"min_8bit_size": 0, "master_weights": bits}, 5, marks=pytest.mark.full)
        for new, bits in ((optim.AdamW8bit, "bf16+16"), (optim.Lion8bit, "bf16+8"), (optim.Lion8bit, None))
    ),
]


@pytest.mark.parametrize(("sizes", "build", "new", "options", "count"), BIT_CASES)
def test_bits_of_one_process(ranks: Ranks, sizes: Any, build: Any, new: Any, options: Any, count: int) -> None:
    expected = run_in_one_process(build, new, options, count)
    assert new is optim.AdamW or any(state["exp_avg"].dtype == torch.int8 for state in expected.values())
    for rank in ranks(torch.Size(sizes).numel(), run_sharded, sizes, build, new, options, count):
        assert_same(rank, expected)


def run_placed(
    sizes: tuple[int, ...], shape: tuple[int, ...], placements: Any, new: Any, master_weights: str | None
) -> Any:
    """Parameters and states after steps of three parameters, and the placements of the first one's scales."""
    dtype = torch.bfloat16 if master_weights else torch.float32
    starts = [sharded.gradient(torch.zeros(shape, dtype=dtype), number, 0) for number in (7, 8, 9)]
    holder = nn.ParameterList(nn.Parameter(distribute_tensor(x, mesh(*sizes), placements)) for x in starts)
    optimizer = new(holder.parameters(), min_8bit_size=0, master_weights=master_weights)
    steps(holder, optimizer, 0, 4)
    scales = next(x for key, x in optimizer.state[holder[0]].items() if key.endswith("_scale"))
    return full_params_and_states(holder, optimizer), scales.placements


@pytest.mark.full
@pytest.mark.pairwise
@pytest.mark.parametrize("new", [optim.AdamW8bit, new_muon])
@pytest.mark.parametrize("master_weights", [None, "bf16+8"])
@pytest.mark.parametrize(
    # The mesh's sizes; the tensors' shape; the placements of the tensors, and of the scales of their states.
    ("sizes", "shape", "placements", "scales"),
    [
        ((2,), (40, 512), [Shard(1)], [Shard(1)]),  # whole blocks; tensor parallelism by columns
        ((3,), (40, 500), [Shard(1)], [Replicate()]),
        ((2,), (64, 40), [Replicate()], [Replicate()]),
        ((3,), (64, 40), [Shard(1)], [Replicate()]),
        ((2,), (1, 40), [Shard(0)], [Replicate()]),
        ((2,), (6, 10, 70), [Shard(0)], [Shard(0)]),
        ((3,), (6, 10, 70), [Shard(2)], [Replicate()]),
        ((2, 2), (40, 512), [Shard(0), Shard(1)], [Shard(0), Shard(1)]),  # fully_shard with tensor parallelism
        ((2, 2), (41, 512), [Shard(0), Shard(0)], [Shard(0), Shard(0)]),
        ((2, 2), (41, 30), [Shard(0), Shard(0)], [Replicate(), Replicate()]),
        ((2, 2), (6, 64), [Shard(0), Shard(0)], [Replicate(), Replicate()]),  # 2, 1, 2 and 1 rows, 2 to a block
        ((2, 2), (41, 500), [Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ((1, 2), (41, 500), [Shard(1), Shard(0)], [Shard(1), Shard(0)]),
    ],
)
def test_bits_and_placements_of_scales_by_placement(
    ranks: Ranks, sizes: Any, shape: Any, placements: Any, scales: Any, new: Any, master_weights: str | None
) -> None:
    expected = ranks(1, run_placed, (1,), shape, [Replicate()], new, master_weights)[0][0]
    results = ranks(torch.Size(sizes).numel(), run_placed, sizes, shape, placements, new, master_weights)
    for state, scale_placements in results:
        assert_same(state, expected)
        assert scale_placements == tuple(scales)


@pytest.mark.feature("torch", "`fully_shard`: LAMB and LARS within 1e-6 of one process")
@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "case", "world"),
    [(gpt, case, 3) for case in LAYERWISE] + [(Odd, case, 2) for case in LAYERWISE if "row" not in case],
)
def test_trust_ratios_are_those_of_one_process(ranks: Ranks, build: Any, case: str, world: int) -> None:
    new, options = LAYERWISE[case]
    options = {"min_8bit_size": 0 if build is Odd else 4096, "always_adapt": True, **options}
    expected = run_in_one_process(build, new, options, 1)
    results = ranks(world, run_sharded, (), build, new, options, 1)
    for rank in results:
        for name, state in rank.items():
            ratio = expected[name]["trust_ratio"]  # the norms' squares are summed in another order
            torch.testing.assert_close(state["trust_ratio"], ratio, rtol=1e-6, atol=0)
            torch.testing.assert_close(state["param"], expected[name]["param"], rtol=1e-6, atol=1e-8)
        assert_same(rank, results[0])


@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.Lion, optim.LAMB8bit])
@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_all_ranks_clip_by_the_norm_of_one_process(ranks: Ranks, new: Any, sizes: Any) -> None:
    options = {"min_8bit_size": 0, "max_grad_norm": 0.05, "lr": 1e-2}
    expected = run_in_one_process(Odd, new, options, 1)
    unclipped = run_in_one_process(Odd, new, {**options, "max_grad_norm": None}, 1)
    entry = "exp_avg" if new is optim.Lion else "exp_avg_scale"
    assert not torch.equal(expected["long"][entry], unclipped["long"][entry])
    for rank in ranks(torch.Size(sizes).numel(), run_sharded, sizes, Odd, new, options, 1):
        for name, state in rank.items():
            for key in ("param", *(key for key in state if key.endswith("_scale"))):
                torch.testing.assert_close(state[key], expected[name][key], rtol=1e-6, atol=1e-8)


def count_collectives(new: Any, options: dict[str, Any]) -> list[int]:
    """The number of all-reduces in each of three steps."""
    model = in_shards(gpt())
    optimizer = new(model.parameters(), **options)
    counts, reduce = [], dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return reduce(*args, **kwargs)

    dist.all_reduce = count
    try:
        for step in range(3):
            counts.append(0)
            steps(model, optimizer, step, step + 1)
    finally:
        dist.all_reduce = reduce
    return counts


@pytest.mark.full
@pytest.mark.parametrize(
    ("new", "options", "expected"),  # all-reduces in each step
    [
        (optim.AdamW8bit, {}, [0, 0, 0]),
        (optim.AdamW8bit, {"max_grad_norm": 1.0}, [1, 1, 1]),
        (optim.LAMB8bit, {}, [2, 1, 1]),
        (optim.LARS8bit, {"max_grad_norm": 1.0}, [3, 2, 2]),
    ],
)
def test_all_reduces_of_a_step(ranks: Ranks, new: Any, options: dict[str, Any], expected: list[int]) -> None:
    """LAMB and LARS compare the order of parameters on all ranks in the first step alone."""
    assert ranks(2, count_collectives, new, options) == [expected] * 2


def train(new: Any, options: dict[str, Any], shards: bool, policy: Any = None) -> Any:
    """Losses and parameters of a training loop in which torch reduces the gradients of each rank's own tokens."""
    model = gpt()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = in_shards(model, **(policy or {})) if shards else nn.parallel.DistributedDataParallel(model)
    optimizer = new(model.parameters(), **options)
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 256, (12, 33), generator=generator) // 8
        own_tokens = tokens.chunk(world)[rank]
        loss = F.cross_entropy(model(own_tokens[:, :-1]).flatten(0, 1).float(), own_tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total / world)
    params = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.stack(losses), [p.detach().clone() for p in params]


@pytest.mark.feature(
    "torch", "DistributedDataParallel (replicas with the same bits) and `fully_shard`: losses of one process"
)
@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.Lion8bit, optim.LAMB8bit])
def test_losses_are_those_of_one_process(ranks: Ranks, new: Any) -> None:
    options = {"lr": 1e-3, "max_grad_norm": 1.0}
    expected = ranks(1, train, new, options, False)[0][0]
    assert expected[-1] < expected[0]
    for world, shards in ((2, False), (2, True), (3, True)):
        results = ranks(world, train, new, options, shards)
        for losses, params in results:
            torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)  # torch sums gradients in another order
            if not shards:
                assert_same(params, results[0][1])  # DDP's replicas


@pytest.mark.feature("torch", "`fully_shard`: mixed precision, CPU offload, no reshard after forward")
@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    ],
    ids=["mixed precision", "offload", "no reshard"],
)
def test_losses_under_a_policy_are_those_of_one_process(ranks: Ranks, policy: Any) -> None:
    options = {"lr": 1e-3}
    expected = ranks(1, train, optim.AdamW8bit, options, False)[0][0]
    rtol = 2e-2 if "mp_policy" in policy else 1e-3  # bf16 in the forward and backward pass
    for losses, _ in ranks(2, train, optim.AdamW8bit, options, True, policy):
        torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)


# The options that are set before each of five steps.
CHANGES = [{}, {"block_size": 64}, {"state_bits": 32}, {"state_bits": 8}, {"codec": "dynamic"}]


def run_with_changes(shards: bool) -> Any:
    model = in_shards(Odd()) if shards else Odd()
    optimizer = optim.AdamW8bit(model.parameters(), min_8bit_size=0)
    for step, change in enumerate(CHANGES):
        optimizer.param_groups[0].update(change)
        steps(model, optimizer, step, step + 1)
    return full_params_and_states(model, optimizer)


@pytest.mark.full
def test_states_are_converted_in_the_blocks_of_the_whole_tensor(ranks: Ranks) -> None:
    expected = run_with_changes(False)
    for rank in ranks(3, run_with_changes, True):
        assert_same(rank, expected)


def assert_refused() -> None:
    partial = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh(), [Partial()]))
    with pytest.raises(ValueError, match="sharded or replicated"):
        optim.AdamW8bit([partial])
    with pytest.raises(ValueError, match="contiguous"):
        optim.AdamW8bit([nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh(), [Shard(0)]).t())])


@pytest.mark.full
def test_partial_and_transposed_parameters_are_refused(ranks: Ranks) -> None:
    ranks(2, assert_refused)


def step_with_replicated_gradient() -> Any:
    """A step with a replicated gradient of a sharded parameter: the parameter, its state's placements, report()."""
    p = nn.Parameter(distribute_tensor(torch.ones(9, 40), mesh(), [Shard(0)]))
    optimizer = optim.AdamW8bit([p], min_8bit_size=0)
    p.grad = distribute_tensor(sharded.gradient(p, 0, 0), mesh(), [Replicate()])
    optimizer.step()
    return sharded.full_tensor(p.detach()), optimizer.state[p]["exp_avg"].placements, report()["distributed"]


@pytest.mark.full
def test_a_replicated_gradient_steps_a_shard_and_report_names_its_scales(ranks: Ranks) -> None:
    ((expected, _, report_of_one_rank),) = ranks(1, step_with_replicated_gradient)
    assert report_of_one_rank["process_group"] == "gloo, rank 0 of 1"
    line = "(9,40): replicated scales, stepped on the reference"
    assert line not in report_of_one_rank["shards_end_inside_blocks"]
    for rank, (result, placements, rank_report) in enumerate(ranks(2, step_with_replicated_gradient)):
        assert_same(result, expected)
        assert placements == (Shard(0),)
        assert rank_report["process_group"] == f"gloo, rank {rank} of 2"
        assert line in rank_report["shards_end_inside_blocks"]


def fp32_weights_of(build: Any, master_weights: str, shards: bool) -> Any:
    """to_fp32_state_dict's results after steps, after each of two changes of master_weights, and after loading."""
    model = in_shards(build()) if shards else build()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0, master_weights=master_weights)
    steps(model, optimizer, 0, 3)
    state_dicts = [optim.to_fp32_state_dict(model, optimizer)]
    for value in ("bf16+16", master_weights):
        optimizer.param_groups[0]["master_weights"] = value
        optimizer.state_dict()
        state_dicts.append(optim.to_fp32_state_dict(model, optimizer))
    optim.load_fp32_state_dict(model, optimizer, state_dicts[0])
    steps(model, optimizer, 3, 4)
    state_dicts.append(optim.to_fp32_state_dict(model, optimizer))
    return [{name: sharded.full_tensor(x) for name, x in state_dict.items()} for state_dict in state_dicts]


@pytest.mark.full
@pytest.mark.parametrize("master_weights", ["bf16+16", "bf16+8"])
def test_fp32_state_dicts_are_those_of_one_process(ranks: Ranks, master_weights: str) -> None:
    expected = fp32_weights_of(OddBF16, master_weights, False)
    assert all(x.dtype == torch.float32 for state_dict in expected for x in state_dict.values())
    for rank in ranks(2, fp32_weights_of, OddBF16, master_weights, True):
        assert_same(rank, expected)


def errors_in_16_bits() -> Any:
    """Parameters and states after steps of a model, of one on another mesh that loads them, and the recipe's dict."""
    results = []
    options: dict[str, Any] = {"min_8bit_size": 0, "master_weights": "bf16+16"}
    optimizer: Any = None
    for sizes in ((2,), (1, 2)):
        model = in_shards(OddBF16(), mesh=mesh(*sizes))
        state, optimizer = optimizer and optimizer.state_dict(), optim.AdamW8bit(model.parameters(), **options)
        if state is None:
            steps(model, optimizer, 0, 2)
        else:
            optimizer.load_state_dict(state)
        results.append([*full_params_and_states(model, optimizer).values()])
        results.append([*full(optimizer.state_dict())["state"].values()])
    return results


def test_errors_in_16_bits_are_sent_between_ranks(ranks: Ranks) -> None:
    """Neither gloo nor NCCL sends int16."""
    for saved, saved_whole, loaded, loaded_whole in ranks(2, errors_in_16_bits):
        for x, y, a, b in zip(saved, loaded, saved_whole, loaded_whole, strict=True):
            assert_same({**x, "param": None}, {**y, "param": None})
            assert a["weight_error"].dtype == torch.int16
            assert_same([a[key] for key in b], [*b.values()])
            assert_same(a["weight_error"], x["weight_error"])


# ---- a step in backward(), and a model that is sharded after two steps


def train_in_backward(new: Any, in_backward: bool) -> Any:
    """Parameters and states after three steps, and whether the gradients were freed in each backward pass."""
    model = in_shards(gpt())
    params: Any = muon_groups(model.parameters()) if new is optim.Muon8bit else model.parameters()
    optimizer = optim.StepInBackward(new, params, lr=1e-3) if in_backward else new(params, lr=1e-3)
    freed = []
    for step in range(3):
        tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        freed.append(all(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return full_params_and_states(model, optimizer), freed


@pytest.mark.feature("torch", "`StepInBackward` under `fully_shard`: bits of the step after the backward pass")
@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.LAMB8bit, optim.Muon8bit])
def test_a_step_in_backward_has_the_bits_of_one_after_it(ranks: Ranks, new: Any) -> None:
    after_backward, in_backward = (ranks(2, train_in_backward, new, x) for x in (False, True))
    for (expected, freed_after), (result, freed_in) in zip(after_backward, in_backward, strict=True):
        assert_same(result, expected)
        assert (freed_after, freed_in) == ([False] * 3, [True] * 3)


def shard_after_two_steps(new: Any, options: dict[str, Any]) -> Any:
    model = gpt()
    optimizer = new(model.parameters(), **options)
    steps(model, optimizer, 0, 2)
    in_shards(model)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    steps(model, optimizer, 2, 4)
    return full_params_and_states(model, optimizer)


@pytest.mark.full
def test_states_move_to_the_shards_of_a_model(ranks: Ranks) -> None:
    expected = run_in_one_process(gpt, optim.AdamW8bit, {"lr": 1e-3}, 4)
    for rank in ranks(2, shard_after_two_steps, optim.AdamW8bit, {"lr": 1e-3}):
        assert_same(rank, expected)
