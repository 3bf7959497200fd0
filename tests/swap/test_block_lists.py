"""block_lists finds a model's lists of blocks in each form; checkpoints, compress, apply and plans run with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern import Techniques
from memkern.blocks.block_lists import block_lists
from memkern.memory import saved_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(64, 64), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    """A model that runs ``layers`` in order: modules, None (left out) and lists of modules."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([None] * 3)  # type: ignore[list-item]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList([nn.LayerNorm(64), None])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for block in layer if isinstance(layer, nn.ModuleList) else [layer]:
                x = x if block is None else block(x)
        return self.norms[0](x)


def shared() -> Net:
    """Layers that share their weights."""
    first, second = Block(), Block()
    return Net(first, second, first, second)


def pairs() -> Net:
    """Lists in a list, as x-transformers and vit-pytorch have them: the inner ones are lists of blocks."""
    return Net(*(nn.ModuleList([Block(), None, Block()]) for _ in range(2)))


# Each model with the number of blocks in each of its lists.
MODELS: dict[str, tuple[Callable[[], Net], list[int]]] = {
    "plain": (lambda: Net(*(Block() for _ in range(4))), [4]),
    "with None": (lambda: Net(Block(), None, Block(), None, Block(), Block()), [4]),
    "None first": (lambda: Net(None, *(Block() for _ in range(4))), [4]),
    "shared": (shared, [2]),
    "pairs": (pairs, [2, 2]),
}
over_models = pytest.mark.parametrize("name", MODELS)
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def output_and_gradients(make: Callable[[], Net], apply: Callable[[nn.Module], Any] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = make(), X.clone().requires_grad_()
    if apply is not None:
        apply(model)
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]


@over_models
def test_blocks_are_modules_that_are_called_and_each_is_there_once(name: str) -> None:
    make, counts = MODELS[name]
    model = make()
    lists = list(block_lists(model))
    assert [len(blocks) for blocks in lists] == counts
    assert {block for blocks in lists for block in blocks} == {m for m in model.modules() if isinstance(m, Block)}


def test_the_outermost_of_nested_lists_counts() -> None:
    model = Net(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert list(block_lists(model)) == [[*model.layers]]


@pytest.mark.parametrize(
    "apply",
    [
        memkern.checkpoint_blocks,
        lambda m: memkern.checkpoint_blocks(m, every=2),
        lambda m: memkern.apply(m, Techniques(checkpointing="blocks")),
        lambda m: memkern.compress(m, None),
    ],
)
@over_models
def test_techniques_keep_output_and_gradients(name: str, apply: Callable[[nn.Module], Any]) -> None:
    make, _ = MODELS[name]
    for actual, expected in zip(output_and_gradients(make, apply), output_and_gradients(make), strict=True):
        torch.testing.assert_close(actual, expected)


@over_models
def test_checkpoints_of_all_forms_save_the_inputs_alone(name: str) -> None:
    model = MODELS[name][0]()
    memkern.checkpoint_blocks(model)
    layers = [block for item in model.layers for block in (item if isinstance(item, nn.ModuleList) else [item])]
    calls = sum(isinstance(block, Block) for block in layers)
    assert saved_bytes(lambda: model(X.clone().requires_grad_())) < (calls + 2) * X.nbytes


@pytest.mark.parametrize("options", [{}, {"devices": 2}], ids=str)
@over_models
def test_models_of_all_forms_are_planned(name: str, options: Any) -> None:
    arguments = {"memory": "4GiB", "inputs": X, "device": "cpu", "techniques": {"compile": False}}
    plan = memkern.plan(MODELS[name][0](), **arguments, **options)
    assert "checkpoint every block" in plan.alone
    assert plan.recommended is not None


def test_a_model_with_lists_of_lists_of_unlike_modules_has_none() -> None:
    """The list's items are lists, whose forward is never called, so that no checkpoint would run."""
    model = Net(*(nn.ModuleList([nn.LayerNorm(64), Block()]) for _ in range(3)))
    with pytest.raises(memkern.OptionError, match="the model has no list of like blocks"):
        memkern.checkpoint_blocks(model)
