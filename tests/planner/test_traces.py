"""Traces of a step on fake tensors have the bytes of the real step; traces of two depths extrapolate to more blocks."""

from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern import memory
from memkern.planner import fake_step
from memkern.planner.models import resolve
from memkern.planner.trace import Trace, aligned, peaks
from memkern.techniques import applying
from memkern.techniques.options import Techniques
from tests.support.partitioned import peak
from tests.support.planned_models import WIDTH, Block, Stack, predictor_of


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_bits": 3},
        {"checkpointing": "blocks"},
        {"checkpointing": "blocks", "checkpoint_bits": 8},
        {"checkpointing": "blocks", "checkpoint_every": 2},
        {"precision": "bf16"},
        {"linear_share": 0.2},
    ],
    ids=str,
)
def test_a_trace_has_the_bytes_of_the_real_step(changes: dict[str, Any]) -> None:
    techniques = Techniques(micro_batch=1000, **changes)
    model = Stack()
    traces, more_blocks = predictor_of(model, torch.zeros(2, WIDTH)).traces(techniques)
    predicted = peaks(traces, more_blocks, free_gradients=False, unit=1)
    model.to(applying.weight_dtype(techniques))
    memkern.apply(model, techniques)
    x = torch.randn(1000, WIDTH, dtype=next(model.parameters()).dtype)
    real = memory.peak_bytes(lambda: model(x).backward(), model, x) - memory.tensor_bytes([*model.parameters(), x])
    assert max(sum(phase.values()) for phase in predicted.values()) == real


class Tied(nn.Module):
    """A language model without blocks, with one weight for embedding and head, whose gradients make the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, WIDTH)

    def forward(self, tokens: torch.Tensor, chunked: bool) -> torch.Tensor:
        x, weight = self.embedding(tokens), self.embedding.weight
        if chunked:
            return memkern.functional.linear_cross_entropy(x[:-1], weight, tokens[1:], chunk_size=500)
        return nn.functional.cross_entropy(nn.functional.linear(x[:-1], weight).float(), tokens[1:])


@pytest.mark.parametrize(  # gradients: tensors of the weight's size that are alive at the peak
    ("precision", "chunked", "gradients"), [("fp32", False, 3), ("bf16-mixed", False, 2), ("fp32", True, 2)]
)
def test_the_sum_of_a_tied_weights_gradients_is_made_as_autograd_makes_it(
    precision: str, chunked: bool, gradients: int
) -> None:
    """The sum takes a new buffer where the first gradient is a view, as a linear layer's is; else the first one's."""
    loss = lambda model, batch: model(batch[0], chunked)  # noqa: E731
    tokens = torch.arange(8)
    techniques = Techniques(precision=precision, micro_batch=8)
    predicted = peaks(*predictor_of(Tied(), (tokens,), loss=loss).traces(techniques), free_gradients=False, unit=1)
    model = Tied()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            value = loss(model, (tokens,))
        value.backward()

    real = peak(step)
    weight = model.embedding.weight.nbytes
    assert gradients * weight <= real < (gradients + 1) * weight
    assert abs(sum(predicted["backward"].values()) - real) < 0.1 * weight


class Headed(Stack):
    """A Stack whose head has 100 operators, more than its blocks have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for _ in range(100):
            x = x.sin()
        return x.mean()


@pytest.mark.parametrize("changes", [{}, {"checkpointing": "blocks"}], ids=str)
def test_traces_are_aligned_where_the_blocks_are_not_in_the_middle(changes: dict[str, Any]) -> None:
    def traced(depth: int) -> Trace:
        source = resolve(Headed(depth), None, torch.zeros(2, WIDTH), None, None)
        return fake_step.trace(source, Techniques(micro_batch=100, **changes), "cpu")

    for options in ({"free_gradients": False, "unit": 1}, {"free_gradients": True, "unit": 64}):
        predicted = peaks([traced(3), traced(4)], 5, **options)
        assert predicted == peaks([traced(8)], 0, **options)
        assert all(size >= 0 for phase in predicted.values() for size in phase.values())


def test_traces_of_blocks_that_differ_are_not_aligned() -> None:
    x = torch.zeros(2, WIDTH)
    unlike = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), Block())
    few, many = (fake_step.trace(resolve(m, None, x, None, None), Techniques(), "cpu") for m in (Stack(), unlike))
    assert aligned(few, many) is None


def test_sparse_tensors_have_bytes() -> None:
    embedding, tokens = nn.Embedding(100, 16, sparse=True), torch.tensor([1, 2])
    memory.peak_bytes(lambda: embedding(tokens).sum().backward(), embedding)
    held = 4 * 100 * 16 + 8 * 2 + 4 * 2 * 16  # the weight, and indices and values of its gradient
    assert memory.peak_bytes(lambda: None, embedding) == held
    parts = torch.arange(5), torch.arange(4), torch.ones(4)
    assert memory.tensor_bytes([torch.sparse_csr_tensor(*parts, (4, 4))]) == memory.tensor_bytes(parts)


def test_meta_tensors_have_no_bytes() -> None:
    with memory.LiveBytes() as live:
        torch.empty(1000, device="meta")
        torch.empty(10)
    assert [(s.size, s.born, s.died) for s in live.storages] == [(40, 1, 2)]
    assert (live.live, live.peak) == (0, 40)
