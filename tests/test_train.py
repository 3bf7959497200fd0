"""The training loop: text, batches, steps, checkpoints."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import memory
from memkern.train import (
    ArgumentError,
    Corpus,
    Diverged,
    TrainConfig,
    Trainer,
    comparison,
    load_corpus,
    run,
    scale_lr,
)
from memkern.train import checkpoint as checkpoints
from memkern.train.config import BASELINES, OPTIMIZERS
from memkern.train.data import standard_library_files, step_batches, validation_batches
from memkern.train.loop import decay_groups, warmup_cosine

TEXT = "".join(f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(1500))
SMALL = TrainConfig(
    layers=2, heads=2, width=64, seq_len=32, batch_size=4, steps=6, warmup=1, eval_every=3, eval_tokens=512
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return load_corpus([str(text)], seq_len=32)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def trained(corpus: Corpus, **changes: Any) -> Trainer:
    trainer = Trainer(dataclasses.replace(SMALL, **changes), corpus)
    run([trainer])
    return trainer


def assert_same_run(a: Trainer, b: Trainer) -> None:
    assert a.history.train_loss == b.history.train_loss
    assert a.history.validation == b.history.validation
    assert all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


# Text and batches


def test_the_tail_of_every_file_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"b" * 100)
    (tmp_path / "a").write_bytes(b"a" * 57)
    corpus = load_corpus([str(tmp_path)], seq_len=4)
    assert bytes(corpus.train.tolist()) == b"a" * 52 + b"b" * 90
    assert bytes(corpus.validation.tolist()) == b"a" * 5 + b"b" * 10
    assert corpus.files == 2


def test_which_files_a_folder_gives(tmp_path: Path) -> None:
    for name in ("z/last.txt", "a/one.py", ".git/config", "a/.hidden", "two.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name * 100)
    (tmp_path / "image").write_bytes(b"PNG\0" * 100)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    given = [str(tmp_path), str(tmp_path / "a" / "one.py")]  # the second a duplicate
    corpus = load_corpus(given, seq_len=8)
    names = ["two.txt", "a/one.py", "z/last.txt"]
    assert bytes(corpus.train.tolist()) == b"".join((name * 100)[: 90 * len(name)].encode() for name in names)
    assert load_corpus([str(tmp_path / "image")], seq_len=8).files == 1  # given by its name: taken
    assert load_corpus(given, seq_len=8).digest == corpus.digest
    (tmp_path / "two.txt").write_text("three.tx" * 100)
    assert load_corpus(given, seq_len=8).digest != corpus.digest


def test_the_default_text_is_the_standard_library() -> None:
    files = standard_library_files()
    names = {path.name for path in files}
    assert files == standard_library_files()
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not [path for path in files if {"site-packages", "test", "tests"} & set(path.parts[-4:-1])]
    assert sum(path.stat().st_size for path in files) > 3_000_000


def test_batches_depend_on_seed_and_step_alone(corpus: Corpus) -> None:
    def starts(**changes: int) -> list[torch.Tensor]:
        options = {"seed": 1, "step": 5, "accumulate": 2, "batch_size": 3, "seq_len": 8} | changes
        return [inputs for inputs, _ in step_batches(corpus.train, **options)]

    assert all(torch.equal(a, b) for a, b in zip(starts(), starts(), strict=True))
    assert not torch.equal(torch.cat(starts()), torch.cat(starts(step=6)))
    assert not torch.equal(torch.cat(starts()), torch.cat(starts(seed=2)))
    assert torch.equal(torch.cat(starts()), torch.cat(starts(accumulate=1, batch_size=6)))
    assert not torch.equal(*starts())


def test_targets_are_the_next_bytes_and_reach_the_last(corpus: Corpus) -> None:
    text = torch.arange(10, dtype=torch.uint8)
    seen = set()
    for step in range(40):
        for inputs, targets in step_batches(text, seed=0, step=step, accumulate=1, batch_size=4, seq_len=8):
            assert torch.equal(inputs + 1, targets)
            seen |= {*inputs[:, 0].tolist()}
    assert seen == {0, 1}


def test_validation_windows_are_apart_and_spread() -> None:
    text = (torch.arange(1000) % 251).to(torch.uint8)
    batches = list(validation_batches(text, tokens=400, batch_size=3, seq_len=40))
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 3, 1]
    expected = torch.arange(10) * 24 // 10 * 40  # 10 of the 24 windows that fit
    assert torch.equal(starts, expected % 251)


# Steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(corpus: Corpus, optimizer: str) -> None:
    layerwise = optimizer.startswith(("lamb", "lars"))
    lr = 5e-2 if layerwise else 2e-3  # a share of each matrix's norm
    trainer = trained(corpus, optimizer=optimizer, steps=40, warmup=4, batch_size=8, eval_every=40, lr=lr)
    assert trainer.history.train_loss[0] == pytest.approx(math.log(256), abs=0.1)
    assert trainer.history.validation[-1][0] == 40
    assert trainer.history.validation[-1][1] < (3.0 if layerwise else 2.8)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adam8bit", "lion8bit"])
def test_8_bit_states_follow_the_baseline_at_a_quarter_of_its_bytes(corpus: Corpus, optimizer: str) -> None:
    config = dataclasses.replace(SMALL, optimizer=optimizer, steps=40, lr=2e-3, batch_size=8, width=128)
    baseline, ours = run([Trainer(each, corpus) for each in comparison(config)])
    assert baseline.optimizer == BASELINES[optimizer]
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.01)
    assert 0.25 < ours.optimizer_bytes / baseline.optimizer_bytes < 0.29
    assert baseline.peak_bytes - ours.peak_bytes == baseline.optimizer_bytes - ours.optimizer_bytes


def test_runs_side_by_side_are_the_runs_alone(corpus: Corpus) -> None:
    config = dataclasses.replace(SMALL, optimizer="adamw8bit")
    together = [Trainer(each, corpus) for each in comparison(config)]
    run(together)
    assert_same_run(together[0], trained(corpus, optimizer="torch-adamw"))
    assert_same_run(together[1], trained(corpus, optimizer="adamw8bit"))
    assert together[0].history.train_loss[0] == together[1].history.train_loss[0]  # same start, same batch


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_a_batch_factor_is_a_larger_batch_at_a_scaled_rate(corpus: Corpus, rule: str) -> None:
    factor = {"none": 1, "linear": 4, "sqrt": 2}[rule]
    scaled = trained(corpus, batch_size=2, batch_factor=4, lr_rule=rule, lr=1e-3, steps=5)
    plain = trained(corpus, batch_size=2, accumulate=4, lr=1e-3 * factor, steps=5)
    assert_same_run(scaled, plain)
    assert scaled.config.tokens_per_step == 4 * 2 * SMALL.seq_len


def test_rates_of_larger_batches() -> None:
    assert scale_lr(1e-3, 9, "sqrt") == scale_lr(1e-3, 9) == pytest.approx(3e-3)
    assert scale_lr(1e-3, 9, "linear") == pytest.approx(9e-3)
    assert scale_lr(1e-3, 9, "none") == 1e-3
    assert scale_lr(1e-3, 0.25, "sqrt") == pytest.approx(5e-4)
    for args, message in (
        ((1e-3, 2, "log"), "rule must be one of none, linear, sqrt, got 'log'"),
        ((-1.0, 2, "sqrt"), "base_lr must be 0 or more"),
        ((1e-3, 0, "sqrt"), "batch_factor must be above 0"),
        ((1e-3, math.nan, "sqrt"), "batch_factor must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            scale_lr(*args)


def test_accumulation_is_a_larger_batch(corpus: Corpus) -> None:
    whole = trained(corpus, batch_size=8, optimizer="torch-adamw")
    parts = trained(corpus, batch_size=2, accumulate=4, optimizer="torch-adamw")
    assert parts.history.train_loss == pytest.approx(whole.history.train_loss, rel=1e-4)
    for a, b in zip(weights(parts), weights(whole), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


def test_checkpointed_activations_change_bytes_and_no_loss(corpus: Corpus) -> None:
    kept = trained(corpus, layers=6, batch_size=8)
    again = trained(corpus, layers=6, batch_size=8, checkpoint_activations=True)
    assert_same_run(kept, again)
    assert kept.history.peak_bytes is not None
    assert again.history.peak_bytes is not None
    assert again.history.peak_bytes < 0.8 * kept.history.peak_bytes


def test_few_bits_follow_the_baseline_and_keep_less(corpus: Corpus) -> None:
    options = {"activation_bits": 3, "steps": 60, "lr": 2e-3, "batch_size": 8, "width": 128}
    config = dataclasses.replace(SMALL, **options)
    baseline, ours = run([Trainer(each, corpus) for each in comparison(config)])
    assert (baseline.activations, ours.activations) == ("GELU", "3-bit GELU")
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.02)
    elements = 2 * 8 * 32 * 4 * 128  # of two layers
    assert baseline.saved_bytes - ours.saved_bytes == elements * 4 - elements * 3 // 8
    assert baseline.peak_bytes > ours.peak_bytes


def test_randomized_layers_follow_the_baseline_and_keep_less(corpus: Corpus) -> None:
    config = dataclasses.replace(SMALL, linear_keep=0.25, steps=60, lr=2e-3, batch_size=8)
    baseline, ours = run([Trainer(each, corpus) for each in comparison(config)])
    assert ours.activations == "GELU, 25 % of tokens"
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.1)
    assert ours.saved_bytes < 0.8 * baseline.saved_bytes


def test_measuring_the_last_step_changes_no_bit(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"activation_bits": 3, "linear_keep": 0.25}
    measured = trained(corpus, **options)
    assert measured.history.peak_bytes is not None
    assert measured.history.saved_bytes is not None
    monkeypatch.setattr(memory, "peak_bytes", lambda fn, *held: fn() or 0)
    monkeypatch.setattr(memory, "saved_bytes", lambda fn, *held: fn() or 0)
    assert_same_run(measured, trained(corpus, **options))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_follows_fp32(corpus: Corpus, amp: str) -> None:
    mixed = trained(corpus, amp=amp, steps=20, warmup=2)
    plain = trained(corpus, steps=20, warmup=2)
    assert mixed.history.train_loss != plain.history.train_loss
    assert mixed.history.train_loss[:2] == pytest.approx(plain.history.train_loss[:2], rel=5e-3)
    assert mixed.history.validation[-1][1] == pytest.approx(plain.history.validation[-1][1], rel=1e-2)
    assert all(parameter.dtype == torch.float32 for parameter in mixed.model.parameters())
    assert mixed.scaler.is_enabled() == (amp == "fp16")


@pytest.mark.parametrize("optimizer", ["torch-adamw", "adamw8bit"])
def test_fp16_overflow_skips_the_step_and_lowers_the_scale(corpus: Corpus, optimizer: str) -> None:
    trainer = Trainer(dataclasses.replace(SMALL, amp="fp16", optimizer=optimizer), corpus)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [weight.clone() for weight in weights(trainer)]
    assert math.isfinite(trainer.step())
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert trainer.scaler.get_scale() == 2.0**39
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    trainer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_clipping_bounds_the_gradient(corpus: Corpus) -> None:
    norms = []
    trainer = Trainer(dataclasses.replace(SMALL, clip=0.25, optimizer="torch-adamw"), corpus)

    def record(*_: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).item())

    trainer.optimizer.register_step_pre_hook(record)
    run([trainer])
    assert norms == pytest.approx([0.25] * 6, rel=1e-4)


def test_matrices_decay_and_vectors_do_not(corpus: Corpus) -> None:
    trainer = Trainer(dataclasses.replace(SMALL, weight_decay=0.3), corpus)
    matrices, vectors = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert sum(len(group["params"]) for group in decay_groups(trainer.model, 0)) == len(weights(trainer))


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_learning_rates(warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = warmup_cosine(optimizer, warmup=warmup, steps=20)
    for step in range(20):
        if step < warmup:
            expected = 0.5 * (step + 1) / (warmup + 1)
        else:
            expected = 0.05 + 0.225 * (1 + math.cos(math.pi * (step - warmup) / (20 - warmup)))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_loss_that_is_not_finite_ends_the_run(corpus: Corpus) -> None:
    trainer = Trainer(SMALL, corpus)
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.nan
    with pytest.raises(Diverged, match="adamw8bit: the loss is nan at step 1"):
        trainer.step()


# Checkpoints


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw8bit", "lion8bit", "torch-adamw"])
def test_a_resumed_run_repeats_every_bit(corpus: Corpus, tmp_path: Path, optimizer: str, amp: str) -> None:
    config = dataclasses.replace(SMALL, optimizer=optimizer, amp=amp, accumulate=2)
    straight = Trainer(config, corpus)
    states = {}

    def on_step(trainer: Trainer) -> None:
        states[trainer.steps_done] = trainer.state_dict()
        if trainer.steps_done == 3:
            checkpoints.save(tmp_path / "run.pt", trainer.state_dict())

    run([straight], on_step)
    resumed = Trainer(config, corpus)
    torch.manual_seed(99)
    resumed.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    assert resumed.steps_done == 3
    run([resumed])
    assert_same_run(straight, resumed)
    assert straight.scaler.state_dict() == resumed.scaler.state_dict()
    assert straight.history.peak_bytes == resumed.history.peak_bytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compressed_run_resumes_bit_for_bit(corpus: Corpus, tmp_path: Path, checkpointing: bool) -> None:
    config = dataclasses.replace(
        SMALL, activation_bits=3, linear_keep=0.25, checkpoint_activations=checkpointing
    )
    straight = Trainer(config, corpus)

    def on_step(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            checkpoints.save(tmp_path / "run.pt", trainer.state_dict())

    run([straight], on_step)
    resumed = Trainer(config, corpus)
    resumed.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    run([resumed])
    assert_same_run(straight, resumed)
    assert straight.history.saved_bytes == resumed.history.saved_bytes
    assert_same_run(straight, trained(corpus, activation_bits=3, linear_keep=0.25))


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
        {"optimizer": "adamw"},
        {"batch_size": 2},
        {"steps": 7},
        {"amp": "bf16"},
        {"activation_bits": 3},
    ],
)
def test_another_configuration_is_not_resumed(corpus: Corpus, changes: dict[str, Any]) -> None:
    state = Trainer(SMALL, corpus).state_dict()
    other = Trainer(dataclasses.replace(SMALL, **changes), corpus)
    before = [weight.clone() for weight in weights(other)]
    [(name, value)] = changes.items()
    with pytest.raises(ArgumentError, match=f"{name}: {value} given; allowed: {getattr(SMALL, name)}"):
        other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))


def test_another_text_is_not_resumed(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT.replace("7", "8"))
    other = Trainer(SMALL, load_corpus([str(tmp_path)], seq_len=32))
    with pytest.raises(ArgumentError, match=r"data: .* unchanged"):
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
    (tmp_path / ".run.pt.tmp").write_bytes(b"left by a killed run")
    checkpoints.save(path, trainer.state_dict())
    assert checkpoints.load(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_run_resumes_bit_for_bit(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    steps, path = 200, tmp_path / "run.pt"
    config = dataclasses.replace(SMALL, steps=steps, warmup=None, eval_every=25, save_every=5, threads=1)
    command = [sys.executable, "-m", "memkern", "train", "--data", str(text), "--save", str(path)]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            command += [f"--{field.name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # into some step, or some save
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed_at = checkpoints.load(path)["step"]
    assert 5 <= killed_at < steps

    resume = [sys.executable, "-m", "memkern", "train", "--resume", str(path), "--save", str(path)]
    subprocess.run(resume, check=True, stdout=subprocess.DEVNULL, timeout=120)
    straight = Trainer(config, corpus)
    run([straight])
    resumed = checkpoints.load(path)
    assert resumed["step"] == steps
    assert resumed["history"]["train_loss"] == straight.history.train_loss
    assert resumed["history"]["validation"] == straight.history.validation
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(resumed["model"][name], weight), name
