"""The training loop: its steps."""

import math
from typing import Any

import pytest
import torch

import memkern
from memkern import memory, optim
from memkern.techniques.options import OPTIMIZERS
from memkern.train import Corpus, Diverged, Trainer, loop, run, scale_lr
from memkern.train.loop import warmup_cosine
from tests.support.train_helpers import ADAMW8, SMALL, TORCH_ADAMW, assert_same_run, step_peak, trained, weights


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "bits"),
    [(name, bits) for name in OPTIMIZERS for bits in ((32,) if name.startswith("torch-") else (32, 8))],
)
def test_every_optimizer_learns(corpus: Corpus, optimizer: str, bits: int) -> None:
    layerwise = optimizer in ("lamb", "lars")
    # A share of each matrix's norm; SGD has no second moment to divide by; Muon is slow on matrices of 32 columns.
    lr = 5e-2 if layerwise else 0.3 if "sgd" in optimizer else 1e-2 if optimizer == "muon" else 2e-3
    options = {"optimizer": optimizer, "state_bits": bits, "lr": lr, "micro_batch": 8}
    trainer = trained(corpus, **options, steps=40, warmup=4, eval_every=40)
    assert trainer.history.train_loss[0] == pytest.approx(math.log(256), abs=0.1)
    assert trainer.history.validation[-1][0] == 40
    assert trainer.history.validation[-1][1] < (3.0 if layerwise else 2.8)


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.full) for name in ("adam", "lion"))]
)
def test_8_bit_states_follow_the_baseline_at_a_quarter_of_its_bytes(corpus: Corpus, optimizer: str) -> None:
    config = SMALL.replace(optimizer=optimizer, state_bits=8, steps=40, lr=2e-3, micro_batch=8, width=128)
    baseline, ours = run([Trainer(each, corpus) for each in (config.baseline(), config)])
    assert baseline.optimizer == ("lion" if optimizer == "lion" else f"torch-{optimizer}")
    assert ours.optimizer == f"{optimizer} 8-bit"
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.01)
    assert 0.25 < ours.optimizer_bytes / baseline.optimizer_bytes < 0.29


def test_runs_side_by_side_are_the_runs_alone(corpus: Corpus) -> None:
    config = SMALL.replace(optimizer="adamw", state_bits=8)
    together = [Trainer(each, corpus) for each in (config.baseline(), config)]
    run(together)
    assert_same_run(together[0], trained(corpus, optimizer="torch-adamw", state_bits=32))
    assert_same_run(together[1], trained(corpus, optimizer="adamw", state_bits=8))
    assert together[0].history.train_loss[0] == together[1].history.train_loss[0]  # same start, same batch


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_a_batch_factor_is_a_larger_batch_at_a_scaled_rate(corpus: Corpus, rule: str) -> None:
    factor = {"none": 1, "linear": 4, "sqrt": 2}[rule]
    scaled = trained(corpus, micro_batch=2, batch_factor=4, lr_rule=rule, lr=1e-3, steps=5)
    plain = trained(corpus, micro_batch=2, accumulation=4, lr=1e-3 * factor, steps=5)
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
    whole = trained(corpus, micro_batch=8, optimizer="torch-adamw", state_bits=32)
    parts = trained(corpus, micro_batch=2, accumulation=4, optimizer="torch-adamw", state_bits=32)
    assert parts.history.train_loss == pytest.approx(whole.history.train_loss, rel=1e-4)
    assert parts.history.train_loss[0] == pytest.approx(math.log(256), abs=0.1)  # a mean, of random guesses
    for a, b in zip(weights(parts), weights(whole), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


def test_checkpointed_activations_change_bytes_and_no_loss(corpus: Corpus) -> None:
    kept = trained(corpus, layers=6, micro_batch=8)
    again = trained(corpus, layers=6, micro_batch=8, checkpointing="blocks")
    assert_same_run(kept, again)
    assert step_peak(again) < 0.8 * step_peak(kept)


def test_few_bits_follow_the_baseline_and_keep_less(corpus: Corpus) -> None:
    options = {"activation_bits": 3, "steps": 60, "lr": 2e-3, "micro_batch": 8, "width": 128}
    config = SMALL.replace(**options)
    baseline, ours = run([Trainer(each, corpus) for each in (config.baseline(), config)])
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.02)
    elements = 2 * 8 * 32 * 4 * 128  # of two layers
    assert baseline.saved_bytes - ours.saved_bytes == elements * 4 - elements * 3 // 8


@pytest.mark.full
def test_randomized_layers_follow_the_baseline_and_keep_less(corpus: Corpus) -> None:
    config = SMALL.replace(linear_share=0.25, steps=60, lr=2e-3, micro_batch=8)
    baseline, ours = run([Trainer(each, corpus) for each in (config.baseline(), config)])
    assert ours.validation_loss == pytest.approx(baseline.validation_loss, rel=0.1)
    assert ours.saved_bytes < 0.8 * baseline.saved_bytes


def test_measuring_the_last_step_changes_no_bit(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"activation_bits": 3, "linear_share": 0.25}
    measured = trained(corpus, **options)
    assert measured.history.saved_bytes is not None
    monkeypatch.setattr(memory, "saved_bytes", lambda fn, *held: fn() or 0)
    assert_same_run(measured, trained(corpus, **options))


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_follows_fp32(corpus: Corpus, precision: str) -> None:
    mixed = trained(corpus, precision=precision, steps=20, warmup=2)
    plain = trained(corpus, steps=20, warmup=2)
    assert mixed.history.train_loss != plain.history.train_loss
    assert mixed.history.train_loss[:2] == pytest.approx(plain.history.train_loss[:2], rel=5e-3)
    assert mixed.history.validation[-1][1] == pytest.approx(plain.history.validation[-1][1], rel=1e-2)
    assert all(parameter.dtype == torch.float32 for parameter in mixed.model.parameters())
    assert mixed.scaler.is_enabled() == (precision == "fp16-mixed")


@pytest.mark.parametrize("optimizer", [TORCH_ADAMW, ADAMW8], ids=lambda o: o["optimizer"])
def test_fp16_overflow_skips_the_step_and_lowers_the_scale(corpus: Corpus, optimizer: str) -> None:
    trainer = Trainer(SMALL.replace(precision="fp16-mixed", **optimizer), corpus)
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
    trainer = Trainer(SMALL.replace(clip=0.25, optimizer="torch-adamw", state_bits=32), corpus)

    def record(*_: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).item())

    trainer.optimizer.register_step_pre_hook(record)
    run([trainer])
    assert norms == pytest.approx([0.25] * 6, rel=1e-4)


def test_matrices_decay_and_vectors_do_not(corpus: Corpus) -> None:
    trainer = Trainer(SMALL.replace(weight_decay=0.3), corpus)
    matrices, vectors = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(weights(trainer))


def test_modules_that_ask_for_32_bit_states_have_them(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(model: torch.nn.Module, *_: Any) -> None:
        memkern.compress(model, None, embeddings=True)

    monkeypatch.setattr(loop, "apply", marked)
    trainer = Trainer(SMALL, corpus)
    bits = {p: group["state_bits"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert isinstance(trainer.optimizer, optim.AdamW)
    assert [name for name, p in trainer.model.named_parameters() if bits[p] == 32] == ["embedding.weight"]


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
    with pytest.raises(Diverged, match="adamw 8-bit: the loss is nan at step 1"):
        trainer.step()
