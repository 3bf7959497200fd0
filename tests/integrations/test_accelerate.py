"""accelerate's training loop with memkern: the bits of a plain loop, and resuming from a saved state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.integrations.models import compiled_gpt2, gpt2, parameters_of, tokens
from tests.support.helpers import assert_same

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("fresh_compiler")]


def batches(first: int, last: int) -> list[torch.Tensor]:
    return [tokens(4, seed) for seed in range(first, last)]


def compressed_gpt2(seed: int = 0) -> Any:
    model = gpt2(seed)
    memkern.compress(model)
    return model


MODELS = pytest.mark.parametrize("make", [compressed_gpt2, compiled_gpt2])


def prepared(make: Callable[..., Any], seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """An accelerator, and the model, optimizer and schedule that it has prepared."""
    model = make(seed)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, data: list[torch.Tensor]) -> None:
    for rows in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.feature("accelerate", "loop with accumulation, clipping and a schedule: bits of the plain loop")
@MODELS
def test_the_loop_has_the_bits_of_a_plain_loop(make: Callable[..., Any]) -> None:
    parts = prepared(make)
    train(*parts, batches(0, 8))

    model = make()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    for i, rows in enumerate(batches(0, 8)):
        (model(input_ids=rows, labels=rows).loss / 2).backward()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same(parameters_of(parts[1]), parameters_of(model))


@pytest.mark.feature("accelerate", "`save_state`, `load_state`: resumes bit for bit")
@MODELS
def test_a_saved_state_resumes_bit_for_bit(tmp_path: Path, make: Callable[..., Any]) -> None:
    straight = prepared(make)
    train(*straight, batches(0, 4))
    straight[0].save_state(str(tmp_path))
    train(*straight, batches(4, 8))
    resumed = prepared(make, seed=1)
    resumed[0].load_state(str(tmp_path))
    train(*resumed, batches(4, 8))
    assert_same(parameters_of(resumed[1]), parameters_of(straight[1]))
