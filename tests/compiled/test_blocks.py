"""Blocks that memkern.compile and apply compile in place train at varying lengths, and are copied and pickled."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import memkern
from memkern import Techniques
from memkern.compiled import blocks
from memkern.compiled.blocks import is_compiled
from tests.support.partitioned import relative_error, step, without_kernels

from .blocks import Block

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH = 64


class Net(nn.Module):
    """Three transformer blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def applied(**techniques: Any) -> nn.Module:
    """A Net whose blocks memkern.apply has compiled with 8-bit codes."""
    model = Net()
    memkern.apply(model, Techniques(compile=True, saved_bits=8, **techniques))
    return model


@pytest.mark.full
def test_varying_lengths_take_two_graphs() -> None:
    """Gradients as sizes change are looked at in test_few_bit.py and test_layouts.py."""
    model, plain = applied(), Net()
    for length in (64, 100, 33, 77):
        x = torch.randn(2, length, WIDTH, requires_grad=True)  # so that all blocks' inputs need gradients
        with without_kernels():
            saved = memkern.memory.saved_bytes(lambda x=x: model(x), model, x)
        assert saved < 0.4 * memkern.memory.saved_bytes(lambda x=x: plain(x), plain, x)
    assert counters["stats"]["unique_graphs"] == 2  # a graph for the first length, and one for any


@pytest.mark.full
def test_torchs_limit_is_a_warning_that_names_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block's input needs no gradient, the second block's does."""
    monkeypatch.setattr(blocks, "_GRAPHS", 1)
    model, x = applied(), torch.randn(2, 64, WIDTH)
    tracked = x.clone().requires_grad_()
    plain = memkern.memory.saved_bytes(lambda: Net().layers[0](tracked))  # type: ignore[operator]
    config = torch._dynamo.config
    with config.patch(recompile_limit=1):
        with pytest.warns(UserWarning, match=rf"Block.forward has .* as now, and saves {plain:,} bytes") as warned:
            saved, actual = step(model, x)
        assert len(warned) == 1
        assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == (1, False)
    assert 2 * plain - 2 * x.nbytes < saved < 3 * plain  # two of three blocks run uncompiled
    assert relative_error(actual, step(Net(), x)[1]) < 0.02


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("checkpointing", [None, "blocks"])
@pytest.mark.parametrize("method", COPIES)
def test_copies_are_compiled_models(method: str, checkpointing: str | None) -> None:
    model = applied(checkpointing=checkpointing)
    copied = COPIES[method](model)
    assert copied.state_dict().keys() == Net().state_dict().keys()
    assert all(map(is_compiled, copied.layers))  # type: ignore[arg-type, union-attr]
    with pytest.raises(memkern.OptionError, match=r"layers\.0 is compiled already"):
        memkern.apply(copied, Techniques(compile=True))
    if checkpointing is None:
        for layer in copied.layers:  # type: ignore[union-attr]
            assert layer.forward.args == (layer,)
            assert layer.forward.func is copied.layers[0].forward.func  # type: ignore[index, union-attr]
            assert layer.forward.func.arguments == applied().layers[0].forward.func.arguments  # type: ignore[index, union-attr]
            assert [*inspect.signature(layer.forward).parameters] == ["x"]


@pytest.mark.full
@pytest.mark.parametrize(("method", "checkpointing"), [("pickled", "blocks"), ("copied", None)])
def test_copies_compute_with_their_own_weights(method: str, checkpointing: str | None) -> None:
    model, x = applied(checkpointing=checkpointing), torch.randn(2, 64, WIDTH)
    expected = step(model, x)
    copied = COPIES[method](model)
    saved, gradients = step(copied, x)
    assert saved == expected[0]
    assert torch.equal(gradients, expected[1])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(step(copied, x)[1], gradients)


def test_a_model_with_a_list_of_blocks_is_compiled_by_blocks() -> None:
    model = Net()
    names = [name for name, _ in model.named_modules()]
    keys = model.state_dict().keys()
    assert memkern.compile(model, saved_bits=8) is model
    assert all(map(is_compiled, model.layers))
    assert not is_compiled(model)
    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == keys
    wrapped = nn.Sequential(Net())  # as DDP has it
    assert memkern.compile(wrapped) is wrapped
    assert all(map(is_compiled, wrapped[0].layers))


def test_what_has_no_list_of_blocks_is_compiled_as_a_whole() -> None:
    assert hasattr(memkern.compile(Net(), saved_bits=8, blocks=False), "_orig_mod")
    assert hasattr(memkern.compile(Block()), "_orig_mod")  # without a list
    assert callable(memkern.compile(F.gelu))
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    for layers in (
        nn.ModuleList([norm] * 2),
        nn.ModuleList([linear, nn.Linear(WIDTH, WIDTH)]),
        nn.Sequential(Block(), Block()),
    ):
        small = nn.Sequential(layers, *(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
        assert hasattr(memkern.compile(small), "_orig_mod")  # most parameters are beside the list
        assert not any(map(is_compiled, small.modules()))


def test_blocks_true_without_blocks_is_an_error() -> None:
    model = memkern.compile(Net())
    for refused in (nn.Linear(2, 2), F.gelu, model):
        with pytest.raises(ValueError, match="blocks=True given for what has no list of like blocks that are not"):
            memkern.compile(refused, blocks=True)
    for bad in ("all", 3, None):
        with pytest.raises(ValueError, match="blocks must be 'auto', True or False, got"):
            memkern.compile(Net(), blocks=bad)


@pytest.mark.full
def test_blocks_have_the_gradients_and_bytes_of_the_whole() -> None:
    x = torch.randn(2, 64, WIDTH)
    as_a_whole, by_blocks = Net(), Net()
    compiled = memkern.compile(as_a_whole, saved_bits=8, blocks=False)
    memkern.compile(by_blocks, saved_bits=8)
    saved, expected = step(compiled, x)
    saved_by_blocks, actual = step(by_blocks, x)
    assert saved <= saved_by_blocks < saved + 3 * x.nbytes  # the input of each block is saved as it is
    assert relative_error(actual, expected) < 0.03
