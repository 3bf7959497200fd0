"""The recipe with --weights-on-host layers: losses, checkpoints, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memkern import OptionError
from memkern.__main__ import main
from memkern.train import Corpus, TrainConfig, Trainer, load, run
from memkern.train import checkpoint as checkpoints
from tests.support.train_helpers import SMALL, small_run, train_by_two

PLAIN = SMALL.replace(device="cpu", precision="bf16", master_weights="bf16+8", clip=0.0)
STREAMED = PLAIN.replace(weights_on_host="layers")


def trained(config: TrainConfig, corpus: Corpus) -> Trainer:
    trainer = Trainer(config, corpus)
    run([trainer])
    return trainer


def assert_same(a: Trainer, b: Trainer) -> None:
    assert a.history.train_loss == b.history.train_loss
    assert a.history.validation == b.history.validation
    weights = (a.weights(), b.weights())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


RUNS: list[dict[str, Any]] = [
    {"checkpointing": "blocks", "loss_chunk": 64, "accumulation": 2},
    {"optimizer": "muon", "step_in_backward": True},
    {"optimizer": "lion", "activation_bits": 3, "checkpointing": "blocks"},
    {"optimizer": "lamb", "precision": "fp32", "master_weights": None, "linear_share": 0.5},
    {"optimizer": "torch-adamw", "state_bits": 32, "master_weights": None},
]


@pytest.mark.parametrize("changes", [RUNS[0], *(pytest.param(c, marks=pytest.mark.full) for c in RUNS[1:])], ids=str)
def test_a_run_has_every_bit(corpus: Corpus, changes: dict[str, Any]) -> None:
    assert_same(trained(PLAIN.replace(**changes), corpus), trained(STREAMED.replace(**changes), corpus))


@pytest.mark.full
def test_clipping_is_the_steps_own(corpus: Corpus) -> None:
    """In the step gradients are scaled in fp32, and beside it, by torch, in bf16: losses agree within bf16's rounding
    of what is clipped to a twentieth."""
    plain, streamed = trained(PLAIN.replace(clip=0.05), corpus), trained(STREAMED.replace(clip=0.05), corpus)
    assert streamed.optimizer.defaults["max_grad_norm"] == 0.05
    assert streamed.history.train_loss == pytest.approx(plain.history.train_loss, rel=5e-3)
    assert streamed.history.train_loss != trained(STREAMED, corpus).history.train_loss


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "torch-adamw"])
@pytest.mark.parametrize("before", ["layers", None])
@pytest.mark.parametrize("after", ["layers", None])
def test_it_resumes_with_and_without(
    corpus: Corpus, tmp_path: Path, optimizer: str, before: str | None, after: str | None
) -> None:
    own = {"state_bits": 32, "master_weights": None} if optimizer.startswith("torch") else {}
    config = PLAIN.replace(optimizer=optimizer, checkpointing="blocks", **own)
    straight = trained(config, corpus)
    first = Trainer(config.replace(weights_on_host=before), corpus)
    for _ in range(3):
        first.step()
        if first.steps_done % config.eval_every == 0:
            first.evaluate()
    checkpoints.save(tmp_path / "run.pt", first.state_dict())
    resumed = Trainer(config.replace(weights_on_host=after), corpus)
    resumed.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    assert resumed.steps_done == 3
    run([resumed])
    assert_same(straight, resumed)


@pytest.mark.full
@pytest.mark.parametrize("loss_chunk", [None, 50])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers(text: Path, tmp_path: Path, loss_chunk: int | None, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = PLAIN.replace(
        data=(str(text),), model=str(tmp_path), from_config=True, bytes=True, layers=None, heads=None, width=None,
        loss_chunk=loss_chunk, checkpointing="blocks", step_in_backward=True,
    )  # fmt: skip
    loaded = load(config)
    assert_same(trained(config, loaded), trained(config.replace(weights_on_host="layers"), loaded))


COMMAND = [
    *("train", *small_run(layers=3, batch_size=4, steps=4), "--precision", "bf16"),
    *("--master-weights", "bf16+8", "--clip", "0"),
]


@pytest.mark.full
def test_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        main([*COMMAND, "--data", str(text), *arguments])
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("Validation loss"))

    if dist.is_initialized():
        dist.destroy_process_group()  # other tests' own, which the command would leave
    run_pt = str(tmp_path / "run.pt")
    assert printed("--weights-on-host", "layers", "--save", run_pt, "--out", str(tmp_path / "out")) == printed()
    assert not dist.is_initialized()  # the command's process group has ended with it
    main(["train", "--resume", run_pt, "--weights-on-host", "none"])  # which has ended: its results are printed
    assert "Validation loss" in capsys.readouterr().out


@pytest.mark.full
def test_two_processes_agree_with_one(text: Path, tmp_path: Path) -> None:
    """Gradients are sums in another order: fp32 losses within 1e-5. One micro-batch of each process is a step."""
    arguments = [*COMMAND[1:], "--precision", "fp32", "--master-weights", "none", "--data", str(text)]
    arguments += ["--weights-on-host", "layers", "--batch-factor", "2"]
    main(["train", *arguments, "--save", str(tmp_path / "1.pt")])
    train_by_two(*arguments, "--step-in-backward", "--save", str(tmp_path / "2.pt"))
    one, two = (checkpoints.load(tmp_path / f"{n}.pt") for n in (1, 2))
    for name in ("train_loss", "validation"):
        losses = (torch.tensor(state["history"][name]) for state in (one, two))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_a_step_in_backward_has_one_micro_batch_of_each_process(corpus: Corpus) -> None:
    with pytest.raises(OptionError, match=r"batch_factor: 2 given .* in 1 processes; allowed: 1 with --step"):
        Trainer(STREAMED.replace(step_in_backward=True, batch_factor=2), corpus)


def test_a_model_without_blocks_is_refused_by_name(corpus: Corpus) -> None:
    with pytest.raises(OptionError, match="weights_on_host: 'layers' given; allowed: None for a model without a list"):
        Trainer(STREAMED.replace(layers=1), corpus)
