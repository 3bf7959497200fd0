"""A small model and its training with weights on the host ("streamed") or on the device, for all tests here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern.techniques.applying import optimizer_groups
from memkern.techniques.options import Techniques

WIDTH, CLASSES = 64, 97
PLAIN = Techniques(precision="bf16", state_bits=8, master_weights="bf16+8")
STREAMED = PLAIN.replace(weights_on_host="layers")


class Block(nn.Module):
    """A layer norm and an MLP with GELU, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """A small language model: forward takes tokens and returns their mean loss. tied: embedding and head are one."""

    def __init__(self, tied: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:  # transformers' names, by which memkern finds both
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def model_for(techniques: Techniques, tied: bool = False, blocks: int = 4) -> Model:
    torch.manual_seed(0)
    model = Model(tied, blocks).to(torch.bfloat16 if techniques.precision == "bf16" else torch.float32)
    memkern.apply(model, techniques, device="cpu")
    return model


def optimizer_for(model: nn.Module, techniques: Techniques, **options: Any) -> torch.optim.Optimizer:
    groups = optimizer_groups(model, techniques, lr=1e-2, weight_decay=0.1)
    return memkern.make_optimizer(groups, techniques, lr=1e-2, **options)


def batches(step: int, techniques: Techniques, world: int = 1, rank: int = 0) -> list[Tensor]:
    """The micro-batches of a step, of which rank number ``rank`` of ``world`` has its part."""
    generator = torch.Generator().manual_seed(step)
    count = techniques.accumulation
    tokens = torch.randint(CLASSES, (count, 4, 24), generator=generator)
    return [x.chunk(world)[rank] for x in tokens]


def full_copy(x: Any) -> Tensor:
    """A copy of a tensor, or of all of a DTensor."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    techniques: Techniques,
    steps: range,
    before_step: Callable[[], Any] = lambda: None,
    world: int = 1,
    rank: int = 0,
) -> list[float]:
    """Trains, calls ``before_step`` before each of the optimizer's steps, and returns each micro-batch's loss."""
    losses = []
    for step in steps:
        for tokens in batches(step, techniques, world, rank):
            loss = model(tokens)
            (loss / techniques.accumulation).backward()
            losses.append(loss.item())
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_copy(p) for name, p in model.named_parameters()}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Each parameter's state, by its name."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: {k: full_copy(x) for k, x in s.items() if isinstance(x, Tensor)} for p, s in optimizer.state.items()
    }


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        if isinstance(x, dict):
            assert_equal(x, b[name])
        else:
            assert torch.equal(x, b[name]), name
