"""Under FullyShardedDataParallel (FSDP1), whose shards are flat, options that need a tensor's norm raise; FSDP gathers
the states of whole tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from memkern import optim
from tests.support.ranks import Ranks


def make_models(use_orig_params: bool) -> Any:
    """The same model under FSDP and whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 100))
    return FSDP(copy.deepcopy(model), use_orig_params=use_orig_params, device_id=torch.device("cpu")), model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 256, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_norms_raise(use_orig_params: bool) -> None:
    model, _ = make_models(use_orig_params)
    for new, options, name in (
        (optim.AdamW8bit, {"max_grad_norm": 1.0}, "max_grad_norm"),
        (optim.LAMB8bit, {}, "LAMB8bit"),
        (optim.LARS, {}, "LARS"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} needs norms of whole tensors.*fully_shard"):
            new(model.parameters(), **options)


@pytest.mark.feature("torch", "FSDP1: `max_grad_norm`, LAMB and LARS raise and name `fully_shard`")
@pytest.mark.full
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_norms_of_flat_shards_are_refused(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(2, assert_norms_raise, use_orig_params)


def gather_and_load() -> Any:
    """States: the unsharded model's, those that FSDP gathers, and the optimizer's before and after it loads these."""
    model, unsharded = make_models(False)
    optimizer = optim.AdamW8bit(model.parameters(), min_8bit_size=0)
    fp32_optimizer = optim.AdamW(unsharded.parameters())
    train(model, optimizer, 3)
    train(unsharded, fp32_optimizer, 3)
    state = FSDP.optim_state_dict(model, optimizer)
    expected = copy.deepcopy({name: dict(fp32_optimizer.state[p]) for name, p in unsharded.named_parameters()})
    gathered = copy.deepcopy({name: {**values} for name, values in state["state"].items()})
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, state)
    before = [{key: x.clone() for key, x in values.items()} for values in optimizer.state.values()]
    optimizer.load_state_dict(loaded)
    after = [{key: x.clone() for key, x in values.items()} for values in optimizer.state.values()]
    train(model, optimizer, 1)
    return expected, gathered, before, after


@pytest.mark.feature("torch", "FSDP1: `optim_state_dict`")
@pytest.mark.full
def test_optim_state_dict_has_whole_fp32_states(ranks: Ranks) -> None:
    """Loading quantizes the states again.

    With use_orig_params=True torch 2.13 on the CPU gives exp_avg the values of exp_avg_sq, in torch's AdamW too.
    """
    compared = ("exp_avg", "exp_avg_sq")
    for expected, gathered, before, after in ranks(2, gather_and_load):
        assert {*gathered} == {*expected}
        for name, state in expected.items():
            assert {*gathered[name]} == {"step", "exp_avg", "exp_avg_sq"}
            assert float(gathered[name]["step"]) == 3
            for key in compared:
                error = (gathered[name][key] - state[key]).norm() / state[key].norm()
                assert gathered[name][key].shape == state[key].shape
                assert error < 0.05, f"{name} {key}: {error}"  # the error of 8-bit states after three steps
        for old, new in zip(before, after, strict=True):
            assert {*old} == {*new}
            assert old["exp_avg"].dtype == new["exp_avg"].dtype
            if old["exp_avg"].dtype == torch.int8:
                for key in compared:
                    assert int((old[key].short() - new[key].short()).abs().max()) <= 1  # a code's neighbour


def test_one_process_may_clip_a_flat_parameter_and_not_give_it_to_lamb() -> None:
    p = nn.Parameter(torch.zeros(10))
    optim.LAMB8bit([p])
    p._fsdp_flattened = True  # FSDP1's mark
    optim.AdamW8bit([p], max_grad_norm=1.0)  # clipping needs the norm of all gradients, and one process has them all
    with pytest.raises(RuntimeError, match="fully_shard"):
        optim.LAMB8bit([p])  # LAMB needs a norm for each tensor in the flat parameter
