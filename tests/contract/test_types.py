"""mypy types a user's file as expected, and signatures name every argument with its type."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import memkern

ROOT = Path(memkern.__file__).parents[1]

# A user's file; mypy finds an error in the lines that end in "# ERROR" and in no others.
USER = """# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-decorators
# mypy: disallow-incomplete-defs, warn-return-any, strict-equality
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import memkern
from memkern.optim import LAMB, AdamW, AdamW8bit, HostOffload, Lion8bit, SGD8bit, StepInBackward, param_groups


class Warm(AdamW8bit):
    def __init__(self, params: Any, lr: float = 1e-3, warmup: int = 10) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), state_bits=32)
        self.warmup = warmup

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
report = memkern.compress(model, 2)
assert_type(memkern.restore(model), int)
assert_type(memkern.memory.saved_bytes(lambda: model(torch.ones(8, 8))), int)

optimizer = AdamW8bit([{"params": model[0].parameters(), "lr": 1e-4}], weight_decay=0.1)
assert_type(optimizer, AdamW8bit)
assert_type(memkern.optim.AdamW(model.named_parameters()), AdamW)
assert_type(LAMB(param_groups(model, weight_decay=0.1), lr=torch.tensor(1e-3), max_grad_norm=1.0), LAMB)
assert_type(SGD8bit(model.parameters(), lr=0.1), SGD8bit)
assert_type(Lion8bit(model.parameters(), lr=1e-4), Lion8bit)
assert_type(Warm(model.parameters()), Warm)
assert_type(Warm(model.parameters()).warmup, int)
assert_type(StepInBackward(AdamW, model.parameters(), lr=1e-3), StepInBackward)
assert_type(HostOffload(AdamW8bit, model.parameters(), lr=1e-3), HostOffload)

torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).step()
for group in optimizer.param_groups:
    group["lr"] *= 0.5
moment: Tensor = optimizer.state[next(model.parameters())]["exp_avg"]
optimizer.load_state_dict(optimizer.state_dict())
assert_type(memkern.memory.optimizer_bytes(optimizer), int)

AdamW8bit(model.parameters(), learning_rate=0.1)  # ERROR
AdamW8bit(model.parameters(), lr="fast")  # ERROR
"""
WRONG = [number for number, line in enumerate(USER.splitlines(), start=1) if line.endswith("# ERROR")]


@pytest.mark.full
def test_mypy_types_a_users_file(tmp_path: Path) -> None:
    """pyproject.toml and USER have --strict's options, as mypy would not use the cache of `make lint` with --strict."""
    path = tmp_path / "user.py"
    path.write_text(USER)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", str(path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line for line in run.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in errors] == WRONG, run.stdout + run.stderr


# Two classes wrap another class. StepInBackward's signature is __new__'s (*args, **options), which names no parameters.
# HostOffload has named parameters of its own, and then **options for the class that it wraps.
CLASSES = [name for name in memkern.optim.__all__ if name[0].isupper() and name != "StepInBackward"]


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_name_every_argument_with_its_type(name: str) -> None:
    parameters = inspect.signature(getattr(memkern.optim, name)).parameters
    assert "params" in parameters
    assert all(p.annotation is not p.empty for p in parameters.values())
    assert name == "HostOffload" or not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(memkern.__file__).parent / "py.typed").exists()
