"""memkern.train in two processes (gloo, on the CPU): DDP and fully_shard, resumed runs, refused options."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError
from memkern.__main__ import main
from memkern.train import Corpus, Trainer, checkpoint, cli, distributed, load_corpus
from tests.support.helpers import first_full
from tests.support.ranks import Ranks
from tests.support.train_helpers import (
    SMALL,
    assert_runs_agree,
    assert_same_run,
    printed_by_command,
    small_run_flags,
    straight_and_resumed,
)

OPTIONS = [*small_run_flags(layers=2, batch_size=2, steps=5), "--save-every", "3"]
ON_HOST = ["--weights-on-host", "layers", "--optimizer", "adamw", "--clip", "0", "--batch-factor", "2"]
# flags of both runs, and those of two processes alone
FLAGS: list[tuple[list[str], list[str]]] = [
    (["--parallel", "fsdp"], []),
    (ON_HOST, ["--step-in-backward"]),
    (["--parallel", "ddp"], []),
    (["--parallel", "ddp", "--compile"], []),
    (["--parallel", "fsdp", "--compile"], []),
]


@pytest.mark.feature("torch", "`memkern train` on 1 and 2 processes at equal global batch, DDP and `fully_shard`")
@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(("flags", "of_two"), first_full(FLAGS, 2), ids=str)
def test_one_and_two_processes_agree_at_equal_global_batch(
    ranks: Ranks, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], of_two: list[str]
) -> None:
    arguments = ["--data", str(text), *OPTIONS, "--optimizer", "lamb", "--batch-factor", "4", *flags]
    main(["train", *arguments, "--save", str(tmp_path / "1.pt")])
    options = [*of_two, "--save", str(tmp_path / "2.pt"), "--out", str(tmp_path / "out")]
    first, second = ranks(2, printed_by_command, *arguments, *options)
    assert_runs_agree(tmp_path / "1.pt", tmp_path / "2.pt")
    assert "validation loss" in first
    assert all(line.startswith("[rank1]:") for line in second.splitlines())  # the second prints torch's log alone
    assert (tmp_path / "out" / "losses.png").is_file()
    if flags == ["--parallel", "fsdp"]:  # whole tensors, which load into shards and into one process
        state = checkpoint.load(tmp_path / "2.pt")
        resumed, _ = ranks(2, printed_by_command, "--resume", str(tmp_path / "2.pt"))
        main(["train", "--resume", str(tmp_path / "2.pt"), "--parallel", "ddp"])
        sentence = next(line for line in first.splitlines() if line.startswith("Validation loss")).split(";")[0]
        assert sentence in resumed
        assert sentence in capsys.readouterr().out
        after = checkpoint.load(tmp_path / "2.pt")
        assert all(torch.equal(after["model"][name], x) for name, x in state["model"].items())


def resume_in_two(text: str, parallel: str, path: str) -> None:
    """Each process resumes bit for bit, with linear layers that draw the tokens they save by its own generator."""
    config = SMALL.replace(batch_factor=2, parallel=parallel, linear_share=0.25, activation_bits=3)
    path_of_rank = Path(f"{path}.{distributed.rank()}")
    straight, resumed = straight_and_resumed(config, load_corpus([text], seq_len=32), path_of_rank)
    assert_same_run(straight, resumed)
    sums, sums_of_other = distributed.gathered([x.double().sum().item() for x in straight.weights().values()])
    assert sums == sums_of_other


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_resumed_run_of_two_repeats_every_bit(ranks: Ranks, text: Path, tmp_path: Path, parallel: str) -> None:
    ranks(2, resume_in_two, str(text), parallel, str(tmp_path / "run.pt"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_factor": 3}, "batch_factor: 3 given .* in 2 processes; allowed: a product that 2 divides"),
        ({"step_in_backward": True, "batch_factor": 2}, "step_in_backward: given in 2 processes; allowed in one"),
        ({"step_in_backward": True, "batch_factor": 4, "weights_on_host": "layers"}, "batch_factor: 4 .* allowed: 2"),
        ({"offload": "cpu", "batch_factor": 2}, "offload: 'cpu' given in 2 processes; allowed with --parallel fsdp"),
    ],
    ids=str,
)
def test_several_processes_refuse_options_that_they_cannot_share(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(distributed, "world", lambda: 2)
    with pytest.raises(OptionError, match=message):
        Trainer(SMALL.replace(**changes), corpus)
    monkeypatch.setattr(cli, "world", lambda: 2)
    for mode in ({"compare": True, "fit": None}, {"compare": False, "fit": "2GiB"}):
        args = argparse.Namespace(save=None, resume=None, export=None, **mode)
        with pytest.raises(OptionError, match="given in 2 processes; allowed in one"):
            cli.check_modes(args, SMALL)
