"""States keep their storage format: in files that reorder codes, in copies, and beside entries of other libraries."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim.state import load_moment
from tests.support.generic_optimizers import saved_and_loaded
from tests.support.helpers import assert_same, hard, over_kinds, snapshot, train


def optimizer_saved_and_loaded(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_post_hook_may_give_a_state_dict_any_form() -> None:
    """The hook is given the whole state_dict, the order of blocks included, and returns what it likes."""
    optimizer = optim.AdamW8bit([torch.nn.Parameter(hard((64, 128), 0)), torch.nn.Parameter(hard((8,), 0))])
    train(optimizer, 1)
    expected = optimizer.state_dict()

    def first_alone(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        (group,) = state_dict["param_groups"]
        return {"state": {0: state_dict["state"][0]}, "param_groups": [{**group, "params": [0]}]}

    handle = optimizer.register_state_dict_post_hook(first_alone)
    assert_same(optimizer.state_dict(), first_alone(optimizer, expected))
    handle.remove()
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {"optimizer": state_dict})
    assert_same(optimizer.state_dict(), {"optimizer": expected})


# Memory orders of the dimensions.
ORDERS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("target_order", ORDERS)
@pytest.mark.parametrize("source_order", ORDERS)
def test_codes_that_a_file_made_contiguous_load(source_order: str, target_order: str) -> None:
    """safetensors saves contiguous tensors. The codes still belong to blocks of the memory format before saving."""
    x = hard((8, 16, 8, 8), 0)
    source = optim.AdamW8bit([torch.nn.Parameter(ORDERS[source_order](x))])
    train(source)
    state_dict = saved_and_loaded(source.state_dict())
    state_dict["state"][0] = {key: x.contiguous() for key, x in state_dict["state"][0].items()}
    p = torch.nn.Parameter(ORDERS[target_order](source.param_groups[0]["params"][0].detach().clone()))
    target = optim.AdamW8bit([p])
    target.load_state_dict(state_dict)
    for name in ("exp_avg", "exp_avg_sq"):
        expected = load_moment(name, source.state[source.param_groups[0]["params"][0]])
        moment = load_moment(name, target.state[p])
        error = ((moment - expected).norm() / expected.norm()).item()
        assert error == 0 if source_order == target_order else error < 0.03  # quantized again in other blocks
    if source_order == target_order:
        assert_same(train(target, 1), train(source, 1, first=0))


def test_a_block_order_that_does_not_fit_is_refused() -> None:
    source = optim.AdamW8bit([torch.nn.Parameter(torch.ones(64, 128))])
    train(source)
    for bad in (torch.tensor([0, 0]), torch.tensor([0, 1, 2]), torch.tensor([0.5, 1]), "01"):
        state_dict = saved_and_loaded(source.state_dict())
        state_dict["state"][0]["block_order"] = bad
        before = snapshot(source)
        with pytest.raises(ValueError, match="block_order must be an order of 2 dimensions"):
            source.load_state_dict(state_dict)
        assert_same(snapshot(source), before)


def test_codes_without_an_order_are_refused_by_another_memory_format() -> None:
    x = hard((8, 16, 8, 8), 0)
    source = optim.AdamW8bit([torch.nn.Parameter(x.clone())])
    target = optim.AdamW8bit([torch.nn.Parameter(ORDERS["channels_last"](x))])
    train(source)
    state_dict = saved_and_loaded(source.state_dict())
    del state_dict["state"][0]["block_order"]
    before = snapshot(target)
    with pytest.raises(ValueError, match="strides"):
        target.load_state_dict(state_dict)
    assert_same(snapshot(target), before)


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save", "tree_map"])
def test_copies_of_a_state_know_its_format(copier: str) -> None:
    p = torch.nn.Parameter(hard((64, 128), 0))
    optimizer = optim.AdamW8bit([p], codec="dynamic", block_size=64)
    train(optimizer)
    if copier == "tree_map":
        copied: Any = torch.utils._pytree.tree_map(torch.clone, optimizer.state[p])
    else:
        copiers = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}
        copied_optimizer = copiers.get(copier, optimizer_saved_and_loaded)(optimizer)
        copied = copied_optimizer.state[copied_optimizer.param_groups[0]["params"][0]]
    assert_same(load_moment("exp_avg", copied), load_moment("exp_avg", optimizer.state[p]))
    assert copied.plan is None  # a plan has the original's tensors


def test_removed_parameters_are_freed() -> None:
    optimizer = optim.AdamW8bit([torch.nn.Parameter(torch.zeros(4, 4))])
    refs = []
    for _ in range(2):
        p = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer.add_param_group({"params": [p]})
        p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.param_groups.pop()
        optimizer.state.pop(p)
        refs.append(weakref.ref(p))
        del p
        train(optimizer, 1)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@over_kinds
def test_an_entry_that_a_wrapper_adds_before_the_first_step_stays(build: type) -> None:
    """Wrappers for schedule-free training add such entries."""
    p = torch.nn.Parameter(hard((64, 128), 0))
    optimizer = build([p], min_8bit_size=0)
    optimizer.state[p]["z"] = z = torch.ones(3)
    train(optimizer)
    assert optimizer.state[p]["z"] is z
    without_entry = build([torch.nn.Parameter(hard((64, 128), 0))], min_8bit_size=0)
    train(without_entry)
    assert_same(p.detach(), without_entry.param_groups[0]["params"][0].detach())
