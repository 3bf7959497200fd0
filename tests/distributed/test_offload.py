"""HostOffload of sharded parameters gives the bits of one process without HostOffload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from memkern import optim
from memkern.optim import HostOffload
from memkern.optim.offload import device, host_weights
from tests.support.dcp import load, state_of
from tests.support.helpers import assert_same
from tests.support.late_transfers import LateHostOffload
from tests.support.ranks import Ranks
from tests.support.sharded import Odd, full_params_and_states, gradient, in_shards, mesh, muon_groups

MICRO_BATCHES = 2


class Given(Odd):
    """A model whose backward pass gives the gradients of sharded.gradient() on the first rank and zeros on the others.

    Sums over ranks are therefore exact.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(130, 64))
        self.to(dtype)

    def forward(self, step: int) -> Tensor:
        is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        products = [(p * gradient(p, i, step) * is_first_rank).sum() for i, p in enumerate(self.parameters())]
        return torch.stack(products).sum()


def sharded(model: nn.Module, *sizes: int) -> nn.Module:
    """The model under fully_shard on a mesh of these sizes, whose ranks' gradients are summed."""
    in_shards(model, mesh=mesh(*sizes))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return model


def steps(model: nn.Module, optimizer: Any, first: int, end: int) -> None:
    """Steps number ``first`` to ``end - 1``, each after MICRO_BATCHES backward passes."""
    for step in range(first, end):
        for micro in range(MICRO_BATCHES):
            model(MICRO_BATCHES * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(
    build: Any, model: nn.Module, options: dict[str, Any], wrapper: Any = None, **wrapper_options: Any
) -> torch.optim.Optimizer:
    """The model's optimizer of class ``build``, in a ``wrapper`` such as HostOffload where one is given."""
    params: Any = model.parameters()
    if build is optim.Muon8bit:
        params = muon_groups(params)
    return build(params, **options) if wrapper is None else wrapper(build, params, **wrapper_options, **options)


def run_in_one_process(
    build: Any, options: dict[str, Any], count: int, dtype: torch.dtype = torch.float32, wrapper: Any = None
) -> dict[str, Any]:
    """Parameters and states after ``count`` steps, without HostOffload unless it is the ``wrapper``."""
    model = Given(dtype)
    optimizer = make(build, model, options, wrapper)
    steps(model, optimizer, 0, count)
    return full_params_and_states(model, optimizer)


def train_offloaded(
    build: Any, options: dict[str, Any], count: int, sizes: tuple[int, ...], dtype: torch.dtype, wrappers: Any
) -> list[dict[str, Any]]:
    """Parameters and states after ``count`` steps on a mesh of these sizes, for each wrapper of ``wrappers``."""
    host_weights.BUCKET_ELEMENTS = 2000  # so that there are several buckets
    results = []
    for wrapper, wrapper_options in wrappers:
        model = sharded(Given(dtype), *sizes)
        optimizer = make(build, model, options, wrapper, **wrapper_options)
        # max_grad_norm needs all gradients at once, in one bucket.
        assert len(optimizer._weights.buckets) > 1 or "max_grad_norm" in options
        steps(model, optimizer, 0, count)
        results.append(full_params_and_states(model, optimizer))
    return results


# The optimizer that wraps the build: its class, and its own options.
WRAPPERS = [
    (wrapper, {"offload_gradients": offload_gradients})
    for wrapper in (HostOffload, LateHostOffload)
    for offload_gradients in (False, True)
]
EIGHT_BITS = {"min_8bit_size": 0, "lr": 1e-2}


def test_two_steps_have_the_bits_of_one_process(ranks: Ranks) -> None:
    expected = run_in_one_process(optim.AdamW8bit, EIGHT_BITS, 2)
    for rank in ranks(2, train_offloaded, optim.AdamW8bit, EIGHT_BITS, 2, (), torch.float32, WRAPPERS[-1:]):
        assert_same(rank, [expected])


@pytest.mark.feature("torch", "`HostOffload` under `fully_shard` on 2 and 3 processes: bits of one process")
@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "build", "options"),
    [
        ((3,), optim.AdamW8bit, {"max_grad_norm": 1e-2, "weight_decay": 0.1}),
        ((2, 2), optim.Lion8bit, {"block_size": 64}),
        ((2, 2), optim.LAMB8bit, {"max_grad_norm": 1e-2, "weight_decay": 0.1}),
        ((3,), optim.LARS8bit, {"max_grad_norm": 1e-2, "trust_coeff": 1e-2}),
        ((3,), optim.Muon8bit, {}),
        ((2, 2), torch.optim.AdamW, None),
    ],
)
def test_three_steps_have_the_bits_of_one_process(ranks: Ranks, build: Any, options: Any, sizes: Any) -> None:
    """Also where they clip by norms, which are summed over shards in another order."""
    options = {"lr": 1e-2} if options is None else {**EIGHT_BITS, **options}
    expected = run_in_one_process(build, options, 3)
    if "max_grad_norm" in options:
        unclipped = run_in_one_process(build, {**options, "max_grad_norm": None}, 3)
        assert not torch.equal(expected["table"]["exp_avg_scale"], unclipped["table"]["exp_avg_scale"])
    world = torch.Size(sizes).numel()
    for rank in ranks(world, train_offloaded, build, options, 3, sizes, torch.float32, WRAPPERS):
        for result in rank:
            assert_same(result, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "dtype"), [(optim.AdamW8bit, torch.bfloat16), (torch.optim.AdamW, torch.float16)], ids=str
)
def test_half_precision_models_step_as_in_one_process(ranks: Ranks, build: Any, dtype: torch.dtype) -> None:
    """The fp32 weights on the host, and all else, are those of HostOffload in one process."""
    options = {"lr": 1e-2} if build is torch.optim.AdamW else EIGHT_BITS
    expected = run_in_one_process(build, options, 3, dtype, HostOffload)
    for rank in ranks(2, train_offloaded, build, options, 3, (), dtype, WRAPPERS):
        for result in rank:
            assert_same(result, expected)


# ---- saved and loaded


def resume(build: Any, options: Any, dtype: torch.dtype, path: str, first: int, end: int, save_to: str) -> Any:
    """Loads ``path`` if it is not "", takes steps ``first`` to ``end - 1``, saves to ``save_to`` if that is not ""."""
    host_weights.BUCKET_ELEMENTS = 2000
    model = sharded(Given(dtype))
    optimizer = LateHostOffload(build, model.parameters(), **options)
    if path:
        load(model, optimizer, path)
    steps(model, optimizer, first, end)
    if save_to:
        dcp.save(state_of(model, optimizer), checkpoint_id=save_to)
    return full_params_and_states(model, optimizer)


@pytest.mark.feature("torch", "`HostOffload` under `fully_shard`: saved by 2, loaded by 3, then by 1, bit for bit")
@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "options", "dtype"),
    [
        (optim.AdamW8bit, {"max_grad_norm": 1e-2, **EIGHT_BITS}, torch.float32),
        (optim.AdamW8bit, EIGHT_BITS, torch.bfloat16),
        (torch.optim.AdamW, {"lr": 1e-2}, torch.bfloat16),  # its state dict has no fp32 weights
        (optim.AdamW8bit, {"step_on": "device", **EIGHT_BITS}, torch.float32),
    ],
)
def test_other_ranks_resume_bit_for_bit(
    ranks: Ranks, tmp_path: Path, build: Any, options: Any, dtype: torch.dtype
) -> None:
    a, b = (str(tmp_path / name) for name in "ab")
    ranks(2, resume, build, options, dtype, "", 0, 2, a)
    ranks(3, resume, build, options, dtype, a, 2, 4, b)
    (result,) = ranks(1, resume, build, options, dtype, b, 4, 6, "")
    assert_same(result, run_in_one_process(build, options, 6, dtype, HostOffload))
    if dtype == torch.float32:
        options = {key: x for key, x in options.items() if key != "step_on"}
        assert_same(result, run_in_one_process(build, options, 6))


# ---- step_on="device"


class Rows(Given):
    """A model of one matrix whose shards are whole blocks, as step_in_backward needs for 8-bit states of shards."""

    def __init__(self) -> None:
        super().__init__()
        del self.long, self.short, self.tiny, self.whole
        self.table = nn.Parameter(torch.randn(131, 192))


def step_on_the_device(build: Any, options: dict[str, Any], in_backward: bool) -> Any:
    device.BUCKET_BYTES = 3000  # so that there are several buckets
    model = sharded(Rows() if in_backward else Given())
    optimizer: Any = make(build, model, options, LateHostOffload, step_on="device", step_in_backward=in_backward)
    for step in range(3):
        model(step).backward()
        assert not in_backward or all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    # The states are in several buckets. Where the step is in the backward pass, that is not checked.
    assert in_backward or len({state.region for state in optimizer.state.values()}) > 1
    return full_params_and_states(model, optimizer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "in_backward"),
    [(optim.AdamW8bit, False), (optim.LAMB8bit, True), (optim.LARS8bit, False), (optim.Lion8bit, True)],
)
def test_steps_on_the_device_have_the_bits_of_one_process(ranks: Ranks, build: Any, in_backward: bool) -> None:
    options = {**EIGHT_BITS, **({} if in_backward else {"max_grad_norm": 1e-2})}
    model = Rows() if in_backward else Given()
    optimizer = make(build, model, options)
    for step in range(3):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in ranks(3, step_on_the_device, build, options, in_backward):
        assert_same(rank, full_params_and_states(model, optimizer))


def assert_muon_raises() -> None:
    model = sharded(Given())
    with pytest.raises(ValueError, match="params of Muon must be whole tensors with step_on='device', got a DTensor"):
        make(optim.Muon8bit, model, {}, HostOffload, step_on="device")


@pytest.mark.full
def test_muon_on_the_device_refuses_shards(ranks: Ranks) -> None:
    ranks(2, assert_muon_raises)
