"""The recipe's techniques: what they change of a run, and what the planner chooses."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import OptionError, memory, optim
from memkern.techniques.options import OPTIMIZERS
from memkern.train import Corpus, Source, TrainConfig, Trainer, run
from memkern.train.fit import fit, given_techniques
from tests.support.train_helpers import (
    ADAMW8,
    LION,
    SMALL,
    TORCH_ADAM,
    TORCH_ADAMW,
    assert_same_run,
    step_peak,
    trained,
    weights,
)


def name_of(optimizer: dict[str, Any]) -> str:
    return optimizer["optimizer"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [ADAMW8, LION, TORCH_ADAMW], ids=name_of)
def test_a_step_in_backward_has_the_same_bits_and_fewer_bytes(
    corpus: Corpus, precision: str, optimizer: dict[str, Any]
) -> None:
    # One short sequence: the gradients, not what the forward pass saves, make the peak.
    options = {"precision": precision, **optimizer, "clip": 0.0, "micro_batch": 1, "seq_len": 16}
    whole = trained(corpus, **options)
    freed = trained(corpus, **options, step_in_backward=True)
    assert isinstance(freed.optimizer, optim.StepInBackward)
    assert_same_run(whole, freed)
    assert step_peak(freed) < step_peak(whole)


def test_a_step_in_backward_is_without_clipping_by_default(corpus: Corpus) -> None:
    assert trained(corpus, step_in_backward=True).config.max_norm == 0
    assert trained(corpus).config.max_norm == 1


def test_the_loss_in_chunks_follows_and_saves_no_logits(corpus: Corpus) -> None:
    whole = trained(corpus, steps=20)
    chunked = trained(corpus, steps=20, loss_chunk=100)
    assert chunked.history.train_loss == pytest.approx(whole.history.train_loss, rel=1e-4)
    logits = 4 * 32 * 256 * 4
    assert whole.result().saved_bytes - chunked.result().saved_bytes > 0.9 * logits


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("torch-")])
def test_torchs_optimizers_step_as_torchs_loops_over_tensors(corpus: Corpus, optimizer: str, precision: str) -> None:
    def after_steps(**options: bool) -> Tensor:
        trainer = Trainer(SMALL.replace(optimizer=optimizer, state_bits=32, precision=precision), corpus)
        for group in trainer.optimizer.param_groups:
            group |= options
        for _ in range(4):
            trainer.step()
        state = [x for own in trainer.optimizer.state.values() for x in own.values() if x is not None]
        return torch.cat([x.double().flatten() for x in (*state, *weights(trainer))])

    found, expected = after_steps(), after_steps(fused=False, foreach=False)
    assert (found - expected).norm() <= (1e-4 if precision == "fp32" else 1e-2) * expected.norm()


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("torch-")])
def test_torchs_optimizers_step_weights_on_the_host(corpus: Corpus, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "state_bits": 32, "precision": "bf16"}
    try:
        on_host = trained(corpus, **options, weights_on_host="layers")
        assert on_host.history.train_loss == pytest.approx(trained(corpus, **options).history.train_loss, rel=1e-2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize(("master", "more"), [(None, 0), ("bf16+8", 1), ("bf16+16", 2)])
def test_bf16_weights_follow_fp32(corpus: Corpus, master: str | None, more: int) -> None:
    options = {"width": 128, "steps": 20, "lr": 2e-3}
    plain = trained(corpus, **options)
    half = trained(corpus, **options, precision="bf16", master_weights=master)
    assert {weight.dtype for weight in weights(half)} == {torch.bfloat16}
    assert half.result().validation_loss == pytest.approx(plain.result().validation_loss, rel=0.02)
    added = half.result().bytes_per_parameter - plain.result().bytes_per_parameter
    assert added == pytest.approx(more, abs=0.1)
    assert memory.tensor_bytes(weights(half)) == memory.tensor_bytes(weights(plain)) // 2


@pytest.mark.parametrize("optimizer", [ADAMW8, LION, TORCH_ADAM], ids=name_of)
def test_offload_has_the_same_bits(corpus: Corpus, optimizer: dict[str, Any]) -> None:
    options = {**optimizer, "accumulation": 2, "clip": 0.0}
    here = trained(corpus, **options)
    there = trained(corpus, **options, offload=True)
    assert isinstance(there.optimizer, optim.HostOffload)
    assert_same_run(here, there)


@pytest.mark.parametrize("optimizer", [ADAMW8, TORCH_ADAM], ids=name_of)
def test_offload_clips(corpus: Corpus, optimizer: dict[str, Any]) -> None:
    options = {**optimizer, "accumulation": 2, "clip": 0.05, "steps": 10}
    here, there = trained(corpus, **options), trained(corpus, **options, offload=True)
    assert there.history.train_loss == pytest.approx(here.history.train_loss, rel=1e-3)
    assert (there.optimizer.defaults.get("max_grad_norm") == 0.05) == (optimizer == ADAMW8)


# The planner

PRESET = SMALL.replace(device="cpu")


@pytest.mark.full
def test_what_fits_is_within_the_limit(corpus: Corpus) -> None:
    config, plan = fit(PRESET, Source(corpus), "2GiB", {}, "cpu")
    assert plan.recommended is not None
    assert plan.recommended.peak < 2 * 2**30
    assert config.techniques == plan.recommended.techniques  # as it is, without a conversion
    assert config.batch_size == 4
    run([Trainer(config.replace(steps=2), corpus)])


@pytest.mark.full
def test_options_that_are_given_stay(corpus: Corpus) -> None:
    given = {
        "optimizer": "lion",
        "state_bits": 8,
        "checkpointing": "blocks",
        "checkpoint_every": 2,
        "precision": "bf16",
        "accumulation": 2,
        "clip": 1.0,
    }
    config, plan = fit(PRESET.replace(**given), Source(corpus), "2GiB", given, "cpu")
    assert {name: config.options()[name] for name in given} == given
    assert not config.techniques.step_in_backward
    assert plan.recommended is not None
    assert plan.recommended.techniques.optimizer == "lion"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        pytest.param(
            "1MiB",
            r"fit: 1MiB given; allowed: 0\.\d\d GiB or more, the least that could do, with .*"
            r"\. Fewer or shorter sequences need less",
            marks=pytest.mark.full,  # 5 s of planning
        ),
        ("lots", "fit: 'lots' given; allowed: bytes as a number, or with a unit: 12GiB"),
    ],
)
def test_what_cannot_fit(corpus: Corpus, size: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fit(PRESET, Source(corpus), size, {}, "cpu")


def test_the_techniques_that_are_given_go_to_the_planner_as_they_are() -> None:
    config = TrainConfig().replace(precision="fp16-mixed", compile=True, saved_bits="exact", accumulation=2)
    assert given_techniques(config, ()) == {"optimizer": "adamw"}
    assert given_techniques(config, {"precision", "saved_bits", "steps"}) == {
        "optimizer": "adamw",
        "precision": "fp16-mixed",
        "saved_bits": "exact",
    }
    micro_batches = {"micro_batch": 4, "accumulation": 6}  # all of a step, with those of --batch-factor
    assert given_techniques(config.replace(batch_factor=3), ()) == {"optimizer": "adamw", **micro_batches}


@pytest.mark.parametrize(("device", "limit"), [("cuda", 8 << 30), ("cpu", None)])
def test_the_host_has_no_more_than_its_memory(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, device: str, limit: int | None
) -> None:
    module = importlib.import_module("memkern.train.fit")
    asked: dict[str, Any] = {}

    def plan(**options: Any) -> Any:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(module, "plan", plan)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 20}.__getitem__)
    with pytest.raises(InterruptedError):
        fit(PRESET, Source(corpus), "2GiB", {}, device)
    assert asked["host_memory"] == limit


@pytest.mark.full
def test_fit_with_several_batches_in_a_step(corpus: Corpus) -> None:
    config, plan = fit(PRESET.replace(batch_factor=3, accumulation=2), Source(corpus), "2GiB", {}, "cpu")
    assert plan.recommended is not None
    assert plan.recommended.techniques.accumulation == 6
    assert (config.techniques.micro_batch, config.techniques.accumulation, config.batch_size) == (4, 2, 24)


@pytest.mark.full
def test_fit_on_the_command_line(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from memkern.__main__ import main

    arguments = ["--layers", "2", "--heads", "2", "--width", "64", "--seq-len", "32", "--steps", "2"]
    out = tmp_path / "out"
    main(["train", "--data", str(text), *arguments, "--device", "cpu", "--fit", "2GiB", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "2GiB fit " in printed
    assert "saved for the backward pass" in printed
    written = json.loads((out / "results.json").read_text())
    assert written["plan"]["peak"] < 2 * 2**30
