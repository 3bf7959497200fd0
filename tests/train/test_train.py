"""The training loop of memkern.train: each technique beside a run without it, optimizers, clipping, decay, rates."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import memory
from memkern.techniques.options import OPTIMIZERS
from memkern.train import Corpus, Trainer, run
from tests.support.train_helpers import SMALL, TORCH_ADAMW, assert_same_run, trained, weights

BF16 = {"precision": "bf16"}
TORCH_SGD = {"optimizer": "torch-sgd", "state_bits": 32}
LONGER = {"steps": 30, "lr": 2e-3, "micro_batch": 8, "width": 128}
OF_MANY_TECHNIQUES = {
    "clip": 0.0, "master_weights": "bf16+8", "optimizer": "lion", "checkpointing": "blocks", "activation_bits": 3,
    "loss_chunk": 64, "accumulation": 2, **BF16,
}  # fmt: skip
SHORT = {"clip": 0.0, "micro_batch": 1, "seq_len": 16}  # gradients, not what the forward pass saves, make the peak

# A technique, options of both runs, the relative difference that losses may have (0: the same bits), and which of
# MEASURES falls by a tenth or more.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], float, str | None]] = {
    "step in backward": ({"step_in_backward": True}, SHORT, 0, "peak"),
    "step in backward, torch's": ({"step_in_backward": True}, SHORT | TORCH_ADAMW, 0, "peak"),
    "checkpoints": ({"checkpointing": "blocks"}, {"layers": 6, "micro_batch": 8}, 0, "peak"),
    "every 2 blocks": ({"checkpointing": "blocks", "checkpoint_every": 2}, {"layers": 6, "micro_batch": 8}, 0, "saved"),
    "offload": ({"offload": "cpu"}, {"accumulation": 2, "clip": 0.0}, 0, None),
    "offload, torch's": ({"offload": "cpu"}, {"accumulation": 2, "clip": 0.05, **TORCH_ADAMW}, 0, None),
    "offload, clips": ({"offload": "cpu"}, {"clip": 0.05, "accumulation": 2, "steps": 10}, 1e-3, None),
    "states on the host": ({"offload": "device", "step_in_backward": True}, SHORT, 0, None),
    "weights on the host": ({"weights_on_host": "layers"}, OF_MANY_TECHNIQUES, 0, None),
    "torch's on the host": ({"weights_on_host": "layers"}, BF16 | TORCH_SGD, 0, None),
    "on the host, clips": ({"weights_on_host": "layers"}, {"clip": 0.05, **BF16}, 5e-3, None),  # in fp32, not in bf16
    "loss in chunks": ({"loss_chunk": 100}, {"steps": 20}, 1e-4, "saved"),
    "bf16 autocast": ({"precision": "bf16-mixed"}, {"warmup": 2}, 5e-3, None),
    "fp16 autocast": ({"precision": "fp16-mixed"}, {"warmup": 2}, 5e-3, None),
    "bf16": (BF16, LONGER, 4e-2, "weights"),
    "bf16 and errors": ({"master_weights": "bf16+8", **BF16}, LONGER, 2e-2, "weights"),
    "few bits": ({"activation_bits": 3}, LONGER, 2e-2, "saved"),
    "some tokens": ({"linear_share": 0.25}, {"steps": 60, "lr": 2e-3, "micro_batch": 8}, 0.1, "saved"),
    "compiled": ({"compile": True}, {}, 1e-5, None),  # fused kernels round elsewhere
    "compiled, 8 bits": ({"compile": True, "saved_bits": 8}, {"precision": "bf16-mixed"}, 1e-3, "saved"),
    "compiled checkpoints": ({"compile": True, "checkpointing": "blocks"}, {"loss_chunk": 64}, 1e-4, "saved"),
    "compiled, stepping": ({"compile": True, "step_in_backward": True}, {"clip": 0.0}, 1e-5, None),
    "compiled on the host": ({"compile": True, "weights_on_host": "layers"}, {"clip": 0.0, **BF16}, 1e-3, None),
    "compiled offload": ({"compile": True, "offload": "cpu", "saved_bits": "exact"}, {}, 1e-5, None),
}
MEASURES = {
    "peak": lambda trainer: memory.peak_bytes(trainer.step, trainer.model, trainer.optimizer),  # of one more step
    "saved": lambda trainer: trainer.history.saved_bytes,
    "weights": lambda trainer: memory.tensor_bytes(weights(trainer)),
}
FULL = ("some tokens", *(name for name in ROWS if name.startswith("compiled")))
LONG = ("compiled", "compiled, stepping", "compiled on the host")  # the last is in test_memory.py, too
TIERS = dict.fromkeys(FULL, pytest.mark.full) | dict.fromkeys(LONG, pytest.mark.long)


@pytest.mark.usefixtures("fresh_compiler", "no_process_group")
@pytest.mark.parametrize("row", [pytest.param(name, marks=TIERS.get(name, ())) for name in ROWS])
def test_a_technique_follows_a_run_without_it(corpus: Corpus, row: str) -> None:
    techniques, common, tolerance, measure = ROWS[row]
    plain, ours = trained(corpus, **common), trained(corpus, **common, **techniques)
    compared = slice(-3, None) if tolerance else slice(None)  # the last losses, or all
    expected, losses = ([*each.history.train_loss[compared], each.evaluate()] for each in (plain, ours))
    assert losses == pytest.approx(expected, rel=tolerance)
    if tolerance == 0:
        assert_same_run(plain, ours)
    if not {"compile", "offload"} & {*techniques}:  # these may round to the same losses
        assert (ours.history.train_loss == plain.history.train_loss) == (tolerance == 0)
    if measure:
        assert MEASURES[measure](ours) < 0.9 * MEASURES[measure](plain)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_a_batch_factor_is_a_larger_batch_at_a_scaled_rate(corpus: Corpus, rule: str, factor: int) -> None:
    scaled = trained(corpus, micro_batch=2, batch_factor=4, lr_rule=rule, lr=1e-3, steps=5)
    assert_same_run(scaled, trained(corpus, micro_batch=2, accumulation=4, lr=1e-3 * factor, steps=5))


def test_techniques_become_norms_and_a_scaler(corpus: Corpus) -> None:
    assert trained(corpus, offload="cpu", clip=0.05).optimizer.defaults["max_grad_norm"] == 0.05
    assert SMALL.replace(step_in_backward=True).max_norm == 0
    mixed = trained(corpus, precision="fp16-mixed")
    assert mixed.scaler.is_enabled()
    assert {weight.dtype for weight in weights(mixed)} == {torch.float32}


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "bits"),
    [(name, 32 if name.startswith("torch-") else 8) for name in OPTIMIZERS],
)
def test_every_optimizer_learns(corpus: Corpus, optimizer: str, bits: int) -> None:
    layerwise = optimizer in ("lamb", "lars")
    # LAMB's and LARS' are shares of each matrix's norm; SGD has no second moment to divide by; Muon is slow on matrices
    # of 32 columns.
    rates = {"lamb": 5e-2, "lars": 5e-2, "sgd": 0.3, "torch-sgd": 0.3, "muon": 1e-2}
    options = {"optimizer": optimizer, "state_bits": bits, "lr": rates.get(optimizer, 2e-3), "micro_batch": 8}
    trainer = trained(corpus, **options, steps=40, warmup=4, eval_every=40)
    assert trainer.history.train_loss[0] == pytest.approx(math.log(256), abs=0.1)
    assert trainer.history.validation[-1][1] < (3.0 if layerwise else 2.8)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lion", marks=pytest.mark.full)])
def test_8_bit_states_follow_the_baseline_beside_them(corpus: Corpus, optimizer: str) -> None:
    config = SMALL.replace(optimizer=optimizer, steps=40, lr=2e-3, micro_batch=8, width=128, activation_bits=3)
    together = [Trainer(each, corpus) for each in (config.baseline(), config)]
    baseline, ours = run(together)
    assert baseline["optimizer"] == ("lion" if optimizer == "lion" else f"torch-{optimizer}")
    assert ours["optimizer"] == f"{optimizer} 8-bit"
    assert ours["validation_loss"] == pytest.approx(baseline["validation_loss"], rel=0.02)
    assert 0.25 < ours["optimizer_bytes"] / baseline["optimizer_bytes"] < 0.29
    assert ours["saved_bytes"] < 0.8 * baseline["saved_bytes"]
    assert_same_run(together[1], trained(corpus, config))
    assert baseline["history"]["train_loss"][0] == pytest.approx(ours["history"]["train_loss"][0], rel=1e-5)


def test_micro_batches_train_as_one_batch(corpus: Corpus) -> None:
    """Their gradients are summed in another order."""
    accumulated, at_once = (trained(corpus, micro_batch=size, accumulation=8 // size, **TORCH_ADAMW) for size in (2, 8))
    assert accumulated.config.tokens_per_step == at_once.config.tokens_per_step == 4 * 2 * 32
    assert accumulated.history.train_loss == pytest.approx(at_once.history.train_loss, rel=1e-4)
    assert accumulated.history.train_loss[0] == pytest.approx(math.log(256), abs=0.1)  # a mean, of random guesses
    for a, b in zip(weights(accumulated), weights(at_once), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("torch-")])
def test_torchs_optimizers_step_as_torchs_loops_over_tensors(corpus: Corpus, optimizer: str) -> None:
    def after_steps(**options: bool) -> Tensor:
        trainer = Trainer(SMALL.replace(optimizer=optimizer, state_bits=32, **BF16), corpus)
        for group in trainer.optimizer.param_groups:
            group |= options
        for _ in range(4):
            trainer.step()
        state = [x for entries in trainer.optimizer.state.values() for x in entries.values() if x is not None]
        return torch.cat([x.double().flatten() for x in (*state, *weights(trainer))])

    actual, expected = after_steps(), after_steps(fused=False, foreach=False)
    assert (actual - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_clipping_bounds_the_gradient(corpus: Corpus, precision: str) -> None:
    norms = []
    # Fused steps unscale by themselves, after this is recorded.
    trainer = Trainer(SMALL.replace(clip=0.25, precision=precision, **TORCH_SGD), corpus)

    def record(*_: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).item())

    trainer.optimizer.register_step_pre_hook(record)
    run([trainer])
    assert norms == pytest.approx([0.25] * 6, rel=1e-4)


def test_matrices_decay_and_vectors_do_not(corpus: Corpus) -> None:
    matrices, vectors = Trainer(SMALL.replace(weight_decay=0.3), corpus).optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert [{p.dim() for p in group["params"]} for group in (matrices, vectors)] == [{2}, {1}]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_rates_warm_up_and_fall_to_a_tenth_by_a_cosine(corpus: Corpus, warmup: int) -> None:
    trainer = Trainer(SMALL.replace(lr=0.5, clip=1e-6, warmup=warmup, steps=20), corpus)
    for step in range(20):
        if step < warmup:
            expected = 0.5 * (step + 1) / (warmup + 1)
        else:
            expected = 0.05 + 0.225 * (1 + math.cos(math.pi * (step - warmup) / (20 - warmup)))
        assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([expected] * 2)
        trainer.step()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
