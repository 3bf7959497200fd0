"""The text that is trained on: files as people have them, and the windows of a step."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern.__main__ import main
from memkern.train import Corpus, TrainConfig, load_corpus
from memkern.train.data import standard_library_files
from tests.support.train_helpers import SMALL

WORDS = "words and words and words"


def lines(odd: str = "", count: int = 30) -> str:
    """JSON lines of which the fourth is ``odd``."""
    rows = [json.dumps({"text": WORDS, "id": 1})] * count
    return "\n".join([*rows[:3], odd, *rows[3:]]) + "\n"


REFUSED: dict[str, tuple[str, Any, str]] = {
    # kind: file, its content, the message
    "half a surrogate": ("a.jsonl", lines('{"text": "\\ud83d"}'), "data: line 4 of 'a.jsonl' has half a surrogate"),
    "5,000 digits": ("a.jsonl", lines('{"text": ' + "9" * 5000), "data: line 4 of 'a.jsonl' is no JSON: Exceeds the"),
    "brackets": ("a.jsonl", lines('{"text": ' + "[" * 100_000), "data: line 4 of 'a.jsonl' is no JSON: "),
    "no JSON": ("a.jsonl", lines("{'text': 1}"), "data: line 4 of 'a.jsonl' is no JSON: Expecting property name"),
    "no object": ("a.jsonl", lines("[1]"), "data: line 4 of 'a.jsonl' is no object; allowed: a JSON object"),
    "null": (
        "a.jsonl",
        lines('{"text": null, "body": "b"}'),
        "text_field: 'text' given, which is no text in line 4",
    ),
    "no field": (
        "a.jsonl",
        lines('{"body": "b"}'),
        "text_field: 'text' given, which is no text in line 4",
    ),
    "Latin-1": ("a.txt", "caf\xe9 ".encode("latin-1") * 300, "data: 'a.txt' given, whose byte 3 is no UTF-8"),
    "UTF-16": ("a.txt", (WORDS * 40).encode("utf-16"), "data: 'a.txt' given, a binary file, or text that is not in"),
    "gzip": ("a.txt.gz", gzip.compress(os.urandom(5000)), "data: 'a.txt.gz' given, a binary file"),
    "CSV": ("a.csv", "text\n" + WORDS * 40, "data: 'a.csv' given, a .csv file; allowed: text in UTF-8 or JSON lines"),
    "nothing": ("a.txt", "", "data: 'a.txt' given, which holds no text for training"),
    "few rows": ("a.jsonl", lines(count=5), "data: 'a.jsonl' given, which holds no text for validation: every tenth"),
    "a short text": ("a.txt", "ten bytes.", "seq_len: 16 given, but 'a.txt' has 9 bytes for training and 1 for"),
    "no such file": ("", "", "data: 'absent' given, which is neither a file nor a folder"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_line_names_file_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, message = REFUSED[kind]
    if name:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", name or "absent", "--seq-len", "16", "--steps", "1", "--device", "cpu"])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    option, _, text = message.partition(": ")
    expected = f"python -m memkern train: error: argument --{option.replace('_', '-')}: {text}"
    assert line.replace(f"{tmp_path.resolve()}/", "").startswith(expected)


@pytest.mark.parametrize("field", ["text", "body"])
def test_rows_of_json_lines(tmp_path: Path, field: str) -> None:
    """Every tenth is for validation; blank lines, a byte order mark and separators of Unicode's own change nothing."""
    rows = [{"id": i, "text": f"row {i}, \u00e9\u2028", "body": f"body {i}"} for i in range(1, 21)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    corpus = load_corpus([str(tmp_path)], seq_len=8, text_field=field)
    texts = [row[field] for row in rows]
    assert bytes(corpus.validation.tolist()).decode().split("\n") == [texts[9], texts[19]]
    assert bytes(corpus.train.tolist()).decode().split("\n") == [*texts[:9], *texts[10:19]]


def test_the_tail_of_every_text_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"b" * 100)
    (tmp_path / "a").write_bytes(b"a" * 57)
    corpus = load_corpus([str(tmp_path)], seq_len=4)
    assert bytes(corpus.train.tolist()) == b"a" * 52 + b"\n" + b"b" * 90
    assert bytes(corpus.validation.tolist()) == b"a" * 5 + b"\n" + b"b" * 10
    assert corpus.files == 2


def test_which_files_a_folder_gives(tmp_path: Path) -> None:
    for name in ("z/last.txt", "a/one.py", ".git/config", "a/.hidden", "two.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name * 100)
    (tmp_path / "image").write_bytes(b"PNG\0" * 100)
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    given = [str(tmp_path), str(tmp_path / "a" / "one.py")]  # the second a duplicate
    corpus = load_corpus(given, seq_len=8)
    expected = b"\n".join((name * 100)[: 90 * len(name)].encode() for name in ("two.txt", "a/one.py", "z/last.txt"))
    assert bytes(corpus.train.tolist()) == expected
    assert [text.split("/")[-1] for text in corpus.left_out] == [
        "broken' (no file)", "image' (a binary file, or text that is not in UTF-8)", "table.csv' (a .csv file)",
    ]  # fmt: skip
    assert "left out: " in corpus.description()
    assert load_corpus(given, seq_len=8).digest == corpus.digest
    (tmp_path / "two.txt").write_text("three.tx" * 100)
    assert load_corpus(given, seq_len=8).digest != corpus.digest


def test_the_default_text_is_the_standard_library() -> None:
    files = standard_library_files()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not [path for path in files if {"site-packages", "test", "tests"} & set(path.parts[-4:-1])]
    assert sum(path.stat().st_size for path in files) > 3_000_000


def test_batches_depend_on_seed_and_step_alone(corpus: Corpus) -> None:
    config = SMALL.replace(accumulation=2, micro_batch=3, seed=1)

    def inputs(step: int = 5, **changes: int) -> torch.Tensor:
        batches = corpus.step(config.replace(**changes), step)
        assert all(torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1]) for batch in batches)
        return torch.cat([batch.inputs for batch in batches])

    assert torch.equal(inputs(), inputs())
    assert not torch.equal(inputs(), inputs(6))
    assert not torch.equal(inputs(), inputs(seed=2))
    assert torch.equal(inputs(), inputs(accumulation=1, micro_batch=6))
    assert len(inputs().unique(dim=0)) == 6


def test_windows_reach_the_last_byte() -> None:
    corpus = Corpus(*[torch.arange(10, dtype=torch.uint8)] * 2, "ten")
    config = TrainConfig(seq_len=8)
    seen = {x for step in range(40) for [batch] in [corpus.step(config, step)] for x in batch.inputs[:, 0].tolist()}
    assert seen == {0, 1}


def test_validation_windows_are_apart_and_spread() -> None:
    text = (torch.arange(1000) % 251).to(torch.uint8)
    config = TrainConfig(seq_len=40, eval_tokens=400).replace(micro_batch=3)
    batches = Corpus(text, text, "text").validation_batches(config)
    assert [len(batch.inputs) for batch in batches] == [3, 3, 3, 1]
    expected = torch.arange(10) * 24 // 10 * 40  # 10 of the 24 windows that fit
    assert torch.equal(torch.cat([batch.inputs[:, 0] for batch in batches]), expected % 251)
