"""Checkpoints of the training loop: a resumed run repeats every bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError
from memkern.train import Corpus, TrainConfig, Trainer, load_corpus, run
from memkern.train import checkpoint as checkpoints
from memkern.train.loop import KEYS
from tests.support.helpers import first_quick
from tests.support.train_helpers import (
    ADAMW8,
    LION8,
    SMALL,
    TEXT,
    TORCH_ADAMW,
    assert_same_run,
    trained,
    typed,
    weights,
)


def straight_and_resumed(config: TrainConfig, corpus: Corpus, tmp_path: Path) -> tuple[Trainer, Trainer]:
    """A whole run, and one that goes on from its third step."""
    straight = Trainer(config, corpus)

    def on_step(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            checkpoints.save(tmp_path / "run.pt", trainer.state_dict())

    run([straight], on_step)
    resumed = Trainer(config, corpus)
    torch.manual_seed(99)
    resumed.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    assert resumed.steps_done == 3
    run([resumed])
    return straight, resumed


@pytest.mark.parametrize("precision", first_quick(["fp16-mixed", "bf16-mixed", "fp32"]))
@pytest.mark.parametrize("optimizer", [ADAMW8, LION8, TORCH_ADAMW], ids=lambda o: o["optimizer"])
def test_a_resumed_run_repeats_every_bit(
    corpus: Corpus, tmp_path: Path, optimizer: dict[str, Any], precision: str
) -> None:
    config = SMALL.replace(**optimizer, precision=precision, accumulation=2)
    straight, resumed = straight_and_resumed(config, corpus, tmp_path)
    assert_same_run(straight, resumed)
    assert straight.scaler.state_dict() == resumed.scaler.state_dict()


@pytest.mark.parametrize("every", [None, 1, 2])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_compressed_run_resumes_bit_for_bit(
    corpus: Corpus, tmp_path: Path, every: int | None, bits: int | None
) -> None:
    config = SMALL.replace(activation_bits=3, linear_share=0.25)
    if every is not None:
        config = config.replace(checkpointing="blocks", checkpoint_every=every, checkpoint_bits=bits)
    straight, resumed = straight_and_resumed(config, corpus, tmp_path)
    assert_same_run(straight, resumed)
    assert straight.history.saved_bytes == resumed.history.saved_bytes
    if bits is None:
        assert_same_run(straight, trained(corpus, activation_bits=3, linear_share=0.25))


def test_a_finished_run_resumes_to_its_result(corpus: Corpus, tmp_path: Path) -> None:
    done = trained(corpus)
    checkpoints.save(tmp_path / "run.pt", done.state_dict())
    again = Trainer(SMALL, corpus)
    again.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    assert run([again]) == [done.result()]


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-4},
        {"seed": 1},
        {"optimizer": "lion"},
        {"state_bits": 32},
        {"micro_batch": 2},
        {"steps": 7},
        {"precision": "bf16-mixed"},
        {"activation_bits": 3},
    ],
)
def test_another_configuration_is_not_resumed(corpus: Corpus, changes: dict[str, Any]) -> None:
    state = Trainer(SMALL, corpus).state_dict()
    other = Trainer(SMALL.replace(**changes), corpus)
    before = [weight.clone() for weight in weights(other)]
    [(name, value)] = changes.items()
    used = SMALL.options()[name]
    used = "none" if used is None else used
    with pytest.raises(OptionError, match=f"{name}: {value} given; allowed: {used}"):
        other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))


def test_a_checkpoint_of_another_version_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    state, path = Trainer(SMALL, corpus).state_dict(), tmp_path / "run.pt"
    assert tuple(state) == KEYS
    other = [[*names, "new"] for names in state["format"]]
    without = [{key: x for key, x in state.items() if key != absent} for absent in KEYS]
    for bad in ([], state | {"new": 1}, state | {"format": other}, *without):
        torch.save(bad, path)
        with pytest.raises(OptionError, match=r"resume: .* is no checkpoint of this version of memkern train"):
            checkpoints.load(path)


def test_another_text_is_not_resumed(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT.replace("7", "8"))
    other = Trainer(SMALL, load_corpus([str(tmp_path)], seq_len=32))
    with pytest.raises(OptionError, match=r"data: .* unchanged"):
        other.load_state_dict(Trainer(SMALL, corpus).state_dict())


@pytest.mark.parametrize("stage", ["write", "replace"])
def test_a_failed_save_leaves_the_old_file(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "run.pt"
    trainer = Trainer(SMALL, corpus)
    checkpoints.save(path, trainer.state_dict())
    old = path.read_bytes()
    trainer.step()

    def half(state: object, file: Any) -> None:
        file.write(old[: len(old) // 2])
        raise OSError("no space left on device")

    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr(torch, "save", half)
        else:
            patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(path, trainer.state_dict())
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    checkpoints.save(path, trainer.state_dict())
    assert checkpoints.load(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_a_killed_run_resumes_bit_for_bit(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    steps, path = 200, tmp_path / "run.pt"
    config = SMALL.replace(steps=steps, warmup=None, eval_every=25, save_every=5)
    command = [sys.executable, "-m", "memkern", "train", "--data", str(text), "--save", str(path)]
    defaults = TrainConfig().options()
    for name, value in config.options().items():
        if value != defaults[name]:
            command += typed(name, value).split()
    same = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=same)
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # into some step, or some save
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed_at = checkpoints.load(path)["step"]
    assert 5 <= killed_at < steps

    resume = [sys.executable, "-m", "memkern", "train", "--resume", str(path)]
    subprocess.run(resume, check=True, stdout=subprocess.DEVNULL, timeout=120, env=same)
    straight = Trainer(config, corpus)
    run([straight])
    resumed = checkpoints.load(path)
    assert resumed["step"] == steps
    assert resumed["history"]["train_loss"] == straight.history.train_loss
    assert resumed["history"]["validation"] == straight.history.validation
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(resumed["model"][name], weight), name
