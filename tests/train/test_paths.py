"""Paths that a run writes: what is refused before anything is written, and what is written as a whole."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern.__main__ import main
from memkern.train import checkpoint, huggingface, report
from memkern.train.data import Bytes

SMALL = [
    *("--layers", "1", "--heads", "2", "--width", "32", "--seq-len", "16", "--batch-size", "2"),
    *("--steps", "2", "--eval-tokens", "32", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("texts/text.txt", "text.txt", "out/results.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("The quick brown fox jumps over the lazy dog. " * 40)
    os.mkfifo("fifo")
    Path("null").symlink_to(os.devnull)
    Path("loop").symlink_to("loop")
    Path("link.txt").symlink_to("text.txt")
    torch.save({}, "run.pt")
    return tmp_path


def tree(folder: Path) -> dict[Path, Any]:
    """Every path with its kind and content."""
    return {
        path: (path.lstat().st_mode, path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None)
        for path in folder.rglob("*")
    }


REFUSED = [
    ("--save texts", "--save", "a checkpoint, in an existing folder"),
    ("--save fifo", "--save", "a checkpoint, in an existing folder"),
    ("--save null", "--save", "a checkpoint, in an existing folder"),
    ("--save text.txt", "--save", "a checkpoint, in an existing folder"),
    ("--save link.txt", "--save", "a checkpoint, in an existing folder"),
    ("--save absent/run.pt", "--save", "a checkpoint, in an existing folder"),
    ("--save text.txt/run.pt --data texts", "--save", "a checkpoint, in an existing folder"),
    ("--save new/results.json --out new", "--save", "a checkpoint, in an existing folder"),
    ("--save texts/losses.png --out texts", "--save", "where --out writes"),
    ("--save new --out new", "--save", "where --out writes"),
    ("--out text.txt --data texts", "--out", "nothing can be written in 'text.txt'"),
    ("--out text.txt/deeper --data texts", "--out", "nothing can be written in 'text.txt/deeper'"),
    ("--out fifo", "--out", "nothing can be written in 'fifo'"),
    ("--out loop", "--out", "nothing can be written in 'loop'"),
]


@pytest.mark.parametrize(("arguments", "name", "piece"), REFUSED, ids=lambda x: x)
def test_paths_are_refused_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: str, name: str, piece: str
) -> None:
    before = tree(here)
    data = [] if "--data" in arguments else ["--data", "text.txt"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *data, *SMALL, *arguments.split()])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m memkern train: error: argument {name}: ")
    assert piece in line
    assert tree(here) == before


def test_results_and_checkpoint_may_share_a_folder(here: Path) -> None:
    """Beside the text, and in place of what an earlier run wrote there; a link stays one."""
    Path("link.pt").symlink_to("out/run.pt")
    for _ in range(2):
        main(["train", "--data", "text.txt", *SMALL, "--save", "link.pt", "--out", "out"])
    assert Path("link.pt").is_symlink()
    assert checkpoint.load(Path("out/run.pt"))["step"] == 2
    assert sorted(os.listdir("out")) == ["losses.png", "results.json", "run.pt"]


def test_what_a_killed_run_left_is_removed() -> None:
    left, of_others = Path(".run.pt.0123abcd.tmp"), Path(".run.pt.x.0123abcd.tmp")
    for path in (left, of_others):
        path.touch()
    main(["train", "--data", "text.txt", *SMALL, "--save", "run.pt"])
    assert checkpoint.load(Path("run.pt"))["step"] == 2
    assert sorted(path.name for path in Path().glob(".*")) == [of_others.name]


def test_two_writers_of_one_path_do_not_mix() -> None:
    path = Path("file")
    with checkpoint.replacing(path) as one, checkpoint.replacing(path) as two:
        one.write_text("one")
        two.write_text("two")
    assert path.read_text() == "one"  # the last to be done
    assert not [*Path().glob(".*")]


class Model:
    """Writes a file, and then there is no room."""

    def save_pretrained(self, folder: str, state_dict: Any) -> None:
        Path(folder, "config.json").write_text("{}")
        raise RuntimeError("I/O error: no space left\non the device")


def test_a_failed_export_leaves_nothing_and_results_are_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir("new")
    with pytest.raises(OSError, match="new: I/O error: no space left"):
        huggingface.export(Model(), {}, Bytes(), here / "new")
    assert not os.listdir("new")


@pytest.mark.full
@pytest.mark.parametrize("fails", ["out", "export"])
def test_results_are_tried_each_by_itself(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300}
    transformers.GPT2Config(**sizes).save_pretrained("model")
    if fails == "out":
        monkeypatch.setattr(report, "losses", lambda results: Path("new/results.json/x").touch())
    else:
        monkeypatch.setattr(transformers.GPT2LMHeadModel, "save_pretrained", Model.save_pretrained)
    arguments = ["--model", "model", "--from-config", "--bytes", "--seq-len", "16", "--steps", "2", "--device", "cpu"]
    with pytest.raises(SystemExit, match="results could not be written: "):
        main(["train", "--data", "text.txt", *arguments, "--out", "new", "--export", "exported"])
    assert sorted(os.listdir("new")) == (["results.json"] if fails == "out" else ["losses.png", "results.json"])
    assert sorted(os.listdir("exported")) == (
        [] if fails == "export" else ["config.json", "generation_config.json", "model.safetensors"]
    )
