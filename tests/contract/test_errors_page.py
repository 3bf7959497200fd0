"""docs/errors.md: each message on it is what memkern says."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern import optim

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
MESSAGES = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 128, dtype=dtype))


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], Any]:
    return lambda: optim.AdamW8bit([parameter(dtype)], **options)


def sparse() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = optim.AdamW8bit(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


def twice() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(memkern.nn.GELU(bits=3)(x).sum(), x, create_graph=True)
    gradient.sum().backward()


def changed_weight() -> None:
    weight, x = parameter(), torch.randn(64, 64, requires_grad=True)
    with memkern.quantize_saved(8):
        y = (x @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    y.backward()


def accumulated() -> None:
    p = parameter()
    _optimizer = optim.StepInBackward(optim.AdamW8bit, [p])
    p.sum().backward()
    p.sum().backward()


def scaled() -> None:
    p = parameter()
    optimizer = optim.StepInBackward(optim.AdamW8bit, [p])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)


def clipped_by_trainer() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from memkern.integrations.transformers import CompressCallback

    optimizer = optim.StepInBackward(optim.AdamW8bit, [parameter()])
    args = transformers.TrainingArguments("out", report_to=[])
    CompressCallback().on_train_begin(args, None, None, model=nn.Linear(2, 2), optimizer=optimizer)


def absent_backend() -> None:
    absent = [name for name, reason in memkern.backend.available().items() if reason]
    if not absent:
        pytest.skip("every backend is available")
    with memkern.use_backend(absent[0]):
        pass


def stepped(cls: Any) -> dict[str, Any]:
    p = parameter()
    optimizer = cls([p])
    p.sum().backward()
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def loaded(cls: Any) -> Callable[[], None]:
    def load() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optim.AdamW8bit([parameter()]).load_state_dict(stepped(cls))

    return load


def train(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        pytest.importorskip("rich")
        from memkern.__main__ import main

        main(["train", *arguments, "--device", "cpu"])

    return run


def without_packages() -> None:
    from memkern.train.cli import check_installed

    check_installed(("a_package_that_is_absent",))


def without_pyarrow() -> None:
    Path("rows.parquet").write_bytes(b"PAR1")
    found = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
        train("--data", "rows.parquet")()


def nine_rows() -> None:
    Path("rows.csv").write_text("text\n" + "fox\n" * 9)
    train("--data", "rows.csv")()


planned = train("--model", "byte-tiny", "--fit", "1MiB", "--data", "text.txt")
CAUSES: dict[str, Callable[[], Any]] = {
    # the beginning of a message: what raises it
    "... has no": made(is_paged=True),
    "unexpected": made(beta=1),
    "master_weights=": made(master_weights="bf16+8"),
    "state_bits must": made(torch.float64),
    "amsgrad needs": made(amsgrad=True),
    "got torch.complex64": made(torch.complex64),
    "max_grad_norm belongs": lambda: optim.AdamW8bit([{"params": [parameter()], "max_grad_norm": 1.0}]),
    "memkern's optimizers": sparse,
    "no second": twice,
    "a parameter or": changed_weight,
    "a second": accumulated,
    "max_grad_norm must": lambda: optim.StepInBackward(optim.AdamW8bit, [parameter()], max_grad_norm=1.0),
    "max_grad_norm=1.0": clipped_by_trainer,
    "a GradScaler": scaled,
    "backend ": absent_backend,
    "the state_dict": loaded(torch.optim.AdamW),
    "group 0:": loaded(optim.AdamW),
    "--fit: ...": planned,
    "--warmup:": train("--steps", "1", "--warmup", "5", "--data", "text.txt"),
    "--seq-len:": train("--steps", "1", "--data", "short.txt"),
    "is no checkpoint:": train("--resume", "short.txt"),
    "memkern train needs": without_packages,
    "--data: ... needs": without_pyarrow,
    "--data: ... given,": nine_rows,
}


FULL = (clipped_by_trainer, planned)  # they import a framework, or plan


def cause_of(message: str) -> Callable[[], Any]:
    (cause,) = [cause for beginning, cause in CAUSES.items() if message.startswith(beginning)]
    return cause


def test_each_cause_is_of_a_message() -> None:
    assert len(MESSAGES) == len(CAUSES) > 20


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        pytest.param(message, cause, marks=pytest.mark.full if cause in FULL else (), id=message)
        for message, cause in zip(MESSAGES, map(cause_of, MESSAGES), strict=True)
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_message_is_what_memkern_says(
    message: str,
    cause: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 500)
    Path("short.txt").write_text("fox jumps.")
    with pytest.raises((ValueError, TypeError, RuntimeError, UserWarning, SystemExit)) as raised:
        cause()
    said = capsys.readouterr().err + str(raised.value)
    pattern = ".*".join(map(re.escape, message.split("...")))
    assert re.search(pattern, said, re.DOTALL), said
