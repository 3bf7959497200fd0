"""accelerate's loop with memkern's optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.integrations.models import gpt2, parameters_of, tokens
from tests.support.helpers import assert_same

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.full


def batches(first: int, last: int) -> list[torch.Tensor]:
    return [tokens(4, seed) for seed in range(first, last)]


def prepared(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    model = gpt2(seed)
    memkern.compress(model)
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
def test_the_loop_is_the_plain_loop() -> None:
    parts = prepared()
    train(*parts, batches(0, 8))

    model = gpt2()
    memkern.compress(model)
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
def test_a_saved_state_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = prepared()
    train(*straight, batches(0, 4))
    straight[0].save_state(str(tmp_path))
    train(*straight, batches(4, 8))
    resumed = prepared(seed=1)
    resumed[0].load_state(str(tmp_path))
    train(*resumed, batches(4, 8))
    assert_same(parameters_of(resumed[1]), parameters_of(straight[1]))
