"""States saved by torch.distributed.checkpoint load on another number of ranks, with the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from memkern import optim
from tests.support.dcp import load, state_of
from tests.support.helpers import assert_same
from tests.support.ranks import Ranks
from tests.support.sharded import Odd, full_params_and_states, gpt, in_shards, new_muon, run_in_one_process, steps

OPTIONS = {"min_8bit_size": 0, "weight_decay": 0.1}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def make(build: Any, new: Any, shards: bool = True) -> Any:
    """The model ``build()``, under fully_shard if ``shards``, and its optimizer of class ``new``."""
    model = in_shards(build()) if shards else build()
    return model, new(model.parameters(), **OPTIONS)


def resume(build: Any, new: Any, shards: bool, path: str, first: int, end: int, save_to: str = "") -> Any:
    """Loads the checkpoint at ``path`` where one is given, and takes steps number ``first`` to ``end - 1``."""
    model, optimizer = make(build, new, shards)
    if path:
        load(model, optimizer, path)
    steps(model, optimizer, first, end)
    if save_to:
        dcp.save(state_of(model, optimizer), checkpoint_id=save_to)
    return full_params_and_states(model, optimizer)


@pytest.mark.feature(
    "torch",
    "`torch.distributed.checkpoint`: saved and loaded by 2, 3, 1 and 4 processes in turn, bit for bit",
)
@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "new"),
    [(gpt, optim.AdamW8bit), (Odd, optim.Lion8bit), (Odd, new_muon)],
)
def test_other_numbers_of_ranks_resume_bit_for_bit(ranks: Ranks, tmp_path: Path, build: Any, new: Any) -> None:
    """The ranks resume each other's checkpoints under fully_shard; one rank also without it."""
    expected = run_in_one_process(build, new, OPTIONS, 8)
    a, b, c = (str(tmp_path / name) for name in "abc")
    ranks(2, resume, build, new, True, "", 0, 2, a)
    ranks(3, resume, build, new, True, a, 2, 4, b)
    for shards in (True,) if build is gpt else (True, False):
        (of_one_rank,) = ranks(1, resume, build, new, shards, b, 4, 8, "" if shards else c)
        assert_same(of_one_rank, expected)
    if build is gpt:
        return
    assert_same(ranks(4, resume, build, new, True, a, 2, 8)[3], expected)  # the last rank's result
    expected = run_in_one_process(build, new, OPTIONS, 9)
    assert_same(ranks(3, resume, build, new, True, c, 8, 9)[1], expected)  # the second rank's


def save_or_resume_full_dict(build: Any, new: Any, path: str, options: Any) -> Any:
    """Takes two steps and saves a full state dict to ``path``; where that exists, loads it and takes two more steps."""
    model, optimizer = make(build, new)
    if not Path(path).exists():
        steps(model, optimizer, 0, 2)
        state = state_of(model, optimizer, FULL)
        if dist.get_rank() == 0:
            torch.save(state, path)
        return None
    reads_file = dist.get_rank() == 0 or not options.broadcast_from_rank0
    state = torch.load(path, weights_only=True) if reads_file else {"model": {}, "optim": {}}
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optim"], options=options)
    steps(model, optimizer, 2, 4)
    return full_params_and_states(model, optimizer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("new", "options"), [(optim.AdamW8bit, FROM_RANK_0), (optim.AdamW, FULL)], ids=["from rank 0", "full"]
)
def test_a_full_state_dict_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path, new: Any, options: Any) -> None:
    path = str(tmp_path / "full.pt")
    ranks(2, save_or_resume_full_dict, Odd, new, path, FULL)
    expected = run_in_one_process(Odd, new, OPTIONS, 4)
    for rank in ranks(3, save_or_resume_full_dict, Odd, new, path, options):
        assert_same(rank, expected)


def load_codes_into_fp32_states(path: str) -> str:
    model, optimizer = make(Odd, optim.AdamW8bit)
    steps(model, optimizer, 0, 2)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    model, optimizer = make(Odd, optim.AdamW)
    try:
        load(model, optimizer, path)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_codes_are_not_loaded_as_floats(ranks: Ranks, tmp_path: Path) -> None:
    """torch.distributed.checkpoint.load writes 8-bit codes into 32-bit states silently; the optimizer then raises."""
    for message in ranks(2, load_codes_into_fp32_states, str(tmp_path)):
        assert "state_bits=8" in message


def save_async_and_resume(path: str) -> Any:
    model, optimizer = make(Odd, optim.AdamW8bit)
    steps(model, optimizer, 0, 2)
    group = dist.new_group()  # its collectives and the steps' run at the same time
    future = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=group)
    steps(model, optimizer, 2, 4)  # while it is written
    future.result()
    load(model, optimizer, path)
    steps(model, optimizer, 2, 5)
    return full_params_and_states(model, optimizer)


@pytest.mark.feature("torch", "`torch.distributed.checkpoint.async_save`")
@pytest.mark.full
def test_an_async_save_has_the_states_of_its_call(ranks: Ranks, tmp_path: Path) -> None:
    expected = run_in_one_process(Odd, optim.AdamW8bit, OPTIONS, 5)
    for rank in ranks(2, save_async_and_resume, str(tmp_path)):
        assert_same(rank, expected)
