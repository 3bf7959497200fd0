"""memkern.train and its command with weights_on_host="layers": the losses and checkpoints of weights on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from memkern.__main__ import main
from memkern.train import Corpus, load
from tests.support.train_helpers import (
    SMALL,
    assert_runs_agree,
    assert_same_run,
    small_run_flags,
    straight_and_resumed,
    train_by_two,
    trained,
)

PLAIN = SMALL.replace(device="cpu", precision="bf16", master_weights="bf16+8", clip=0.0)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "torch-adamw"])
@pytest.mark.parametrize(("before", "after"), [("layers", "layers"), ("layers", None), (None, "layers")])
def test_a_run_resumes_with_weights_on_either_side(
    corpus: Corpus, tmp_path: Path, optimizer: str, before: str | None, after: str | None
) -> None:
    changes = {"state_bits": 32, "master_weights": None} if optimizer.startswith("torch") else {}
    config = PLAIN.replace(optimizer=optimizer, checkpointing="blocks", weights_on_host=before, **changes)
    assert_same_run(*straight_and_resumed(config, corpus, tmp_path / "run.pt", weights_on_host=after))


@pytest.mark.full
@pytest.mark.parametrize("loss_chunk", [None, 50])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_trains_alike(text: Path, tmp_path: Path, loss_chunk: int | None, tied: bool) -> None:
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
    assert_same_run(trained(loaded, config), trained(loaded, config, weights_on_host="layers"))


COMMAND = [
    *("train", *small_run_flags(layers=3, batch_size=4, steps=4), "--precision", "bf16"),
    *("--master-weights", "bf16+8", "--clip", "0"),
]


@pytest.mark.full
def test_the_command_prints_the_same_loss(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        main([*COMMAND, "--data", str(text), *arguments])
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("Validation loss"))

    if dist.is_initialized():
        dist.destroy_process_group()  # other tests' own, which the command would leave
    run_pt = str(tmp_path / "run.pt")
    assert printed("--weights-on-host", "layers", "--save", run_pt, "--out", str(tmp_path / "out")) == printed()
    assert not dist.is_initialized()  # the command's process group has ended with it
    main(["train", "--resume", run_pt, "--weights-on-host", "none"])  # a complete run: prints its results
    assert "Validation loss" in capsys.readouterr().out


@pytest.mark.full
def test_two_processes_agree_with_one(text: Path, tmp_path: Path) -> None:
    """A step of one process has two micro-batches; of two processes, each has one of them."""
    arguments = [*COMMAND[1:], "--precision", "fp32", "--master-weights", "none", "--data", str(text)]
    arguments += ["--weights-on-host", "layers", "--batch-factor", "2"]
    main(["train", *arguments, "--save", str(tmp_path / "1.pt")])
    train_by_two(*arguments, "--step-in-backward", "--save", str(tmp_path / "2.pt"))
    assert_runs_agree(tmp_path / "1.pt", tmp_path / "2.pt")
