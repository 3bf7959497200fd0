"""Checkpoints of memkern.train: a resumed run repeats every bit, unfit ones are refused, and writers do not mix."""

from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError
from memkern.train import Corpus, Trainer, checkpoint, load_corpus
from tests.support.train_helpers import (
    BF16_WEIGHTS,
    SMALL,
    TEXT,
    TORCH_ADAMW,
    assert_same_run,
    straight_and_resumed,
    weights,
)

FEW_BITS = {"activation_bits": 3, "linear_share": 0.25}
COMPILED = {"compile": True, "saved_bits": 8, "accumulation": 2, "eval_tokens": 544}  # whose last batch is smaller


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16-mixed", "accumulation": 2},
        {"precision": "bf16-mixed", "optimizer": "lion"},
        TORCH_ADAMW,
        FEW_BITS,
        FEW_BITS | {"checkpointing": "blocks", "checkpoint_bits": 8, "checkpoint_every": 2},
        pytest.param(COMPILED, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_resumed_run_repeats_every_bit(corpus: Corpus, tmp_path: Path, changes: dict[str, Any]) -> None:
    straight, resumed = straight_and_resumed(SMALL.replace(**changes), corpus, tmp_path / "run.pt")
    assert_same_run(straight, resumed)
    assert straight.history.saved_bytes == resumed.history.saved_bytes > 0
    assert straight.scaler.state_dict() == resumed.scaler.state_dict()
    assert {*checkpoint.load(tmp_path / "run.pt")["model"]} == {*Trainer(SMALL, corpus).model.state_dict()}


@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, "layers", "layers"),
        ({"optimizer": "muon"}, "layers", None),
        ({"master_weights": None, **TORCH_ADAMW}, None, "layers"),
    ],
    ids=str,
)
def test_a_run_resumes_with_weights_on_either_side(
    corpus: Corpus, tmp_path: Path, changes: dict[str, Any], before: str | None, after: str | None
) -> None:
    config = SMALL.replace(**BF16_WEIGHTS | changes, checkpointing="blocks", weights_on_host=before)
    assert_same_run(*straight_and_resumed(config, corpus, tmp_path / "run.pt", weights_on_host=after))


def test_checkpoints_that_do_not_fit_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    state, path = Trainer(SMALL, corpus).state_dict(), tmp_path / "run.pt"
    without = {name: x for name, x in state.items() if name != "format"}
    bad: Any
    for bad in ([], without, state | {"format": [[*names, "new"] for names in state["format"]]}):
        torch.save(bad, path)
        with pytest.raises(OptionError, match=r"resume: .* is no checkpoint of this version of memkern train"):
            checkpoint.load(path)
    torch.save(state, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of a tensor
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"cannot be read as a checkpoint: ValueError: .* is damaged"):
        checkpoint.load(path)
    path.write_text(TEXT.replace("7", "8"))
    other_text, model = load_corpus([str(path)], seq_len=32), state["model"] | {"norm.bias": torch.zeros(3)}
    refused: tuple[tuple[dict[str, Any], Corpus, dict[str, Any], str], ...] = (
        ({"lr": 1e-4}, corpus, {}, "lr: 0.0001 given; allowed: none, with which the resumed run began"),
        ({"steps": 7}, corpus, {}, "steps: 7 given; allowed: 6"),
        ({"activation_bits": 3}, corpus, {}, "activation_bits: 3 given; allowed: none"),
        ({}, other_text, {}, r"data: .*run.pt' given; allowed: .* unchanged"),
        ({}, corpus, {"model": model}, "resume: given a checkpoint of another model; allowed: one of byte-tiny"),
    )
    for changes, text, edits, message in refused:
        trainer = Trainer(SMALL.replace(**changes), text)
        before = [weight.add_(1).clone() for weight in weights(trainer)]
        with pytest.raises(OptionError, match=message):
            trainer.load_state_dict(state | edits)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    path.write_text("old")
    opened = path.open()
    with checkpoint.replacing(link) as first, checkpoint.replacing(path) as second:
        first.write_text("one")
        second.write_text("two")
    assert path.read_text() == "one"  # the last to be done
    assert opened.read() == "old"  # which was replaced, not written over
    assert link.is_symlink()
    assert not [*tmp_path.glob(".*")]
