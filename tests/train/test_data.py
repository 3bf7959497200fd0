"""The text that is trained on, and its batches."""

import csv
import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from memkern import OptionError
from memkern.train import Corpus, load_corpus, tables
from memkern.train.data import step_batches, validation_batches
from memkern.train.files import standard_library_files


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
    with pytest.raises(OptionError, match="image' given, a binary file"):
        load_corpus([str(tmp_path / "image")], seq_len=8)
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
        options = {"seed": 1, "step": 5, "accumulation": 2, "micro_batch": 3, "seq_len": 8} | changes
        return [inputs for inputs, _ in step_batches(corpus.train, **options)]

    assert all(torch.equal(a, b) for a, b in zip(starts(), starts(), strict=True))
    assert not torch.equal(torch.cat(starts()), torch.cat(starts(step=6)))
    assert not torch.equal(torch.cat(starts()), torch.cat(starts(seed=2)))
    assert torch.equal(torch.cat(starts()), torch.cat(starts(accumulation=1, micro_batch=6)))
    assert not torch.equal(*starts())


def test_targets_are_the_next_bytes_and_reach_the_last(corpus: Corpus) -> None:
    text = torch.arange(10, dtype=torch.uint8)
    seen = set()
    for step in range(40):
        for inputs, targets in step_batches(text, seed=0, step=step, accumulation=1, micro_batch=4, seq_len=8):
            assert torch.equal(inputs + 1, targets)
            seen |= {*inputs[:, 0].tolist()}
    assert seen == {0, 1}


def test_validation_windows_are_apart_and_spread() -> None:
    text = (torch.arange(1000) % 251).to(torch.uint8)
    batches = list(validation_batches(text, tokens=400, micro_batch=3, seq_len=40))
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 3, 1]
    expected = torch.arange(10) * 24 // 10 * 40  # 10 of the 24 windows that fit
    assert torch.equal(starts, expected % 251)


ROWS = [{"id": i, "text": f"row {i}, \u00e9", "body": f"body {i}"} for i in range(1, 21)]


def write_rows(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text", "body"], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("name", ["text", "body"])
def test_bytes_of_a_table_are_those_of_its_texts(tmp_path: Path, ending: str, name: str) -> None:
    write_rows(tmp_path / f"rows{ending}")
    corpus = load_corpus([str(tmp_path)], seq_len=8, text_field=None if name == "text" else name)
    texts = [row[name] + "\n" for row in ROWS]
    assert bytes(corpus.validation.tolist()) == (texts[9] + texts[19]).encode()
    assert bytes(corpus.train.tolist()) == "".join(texts[:9] + texts[10:19]).encode()
    with pytest.raises(OptionError, match=r"text_field: 'prose' given, which .* has not; allowed: 'id'"):
        load_corpus([str(tmp_path)], seq_len=8, text_field="prose")


def test_parquet_without_pyarrow_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    write_rows(tmp_path / "rows.csv")
    assert load_corpus([str(tmp_path)], seq_len=8).files == 1
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(OptionError, match=r"rows.parquet' needs pyarrow, which the extra memkern\[data\] brings"):
        load_corpus([str(tmp_path)], seq_len=8)


def test_fields_of_csv_are_texts_as_they_stand(tmp_path: Path) -> None:
    texts = [
        "1.50",
        "NA",
        "null",
        "true",
        "007",
        "2020-01-01",
        " a ",
        'say "x"',
        "two\r\nlines",
        "\u2028",
        "x" * 200_000,
    ]
    path = tmp_path / "a[1]*.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["text", "id"], *([text, i] for i, text in enumerate(texts))])
    limit = csv.field_size_limit()
    assert [*tables.texts(path, "text")] == texts
    assert [*tables.texts(path, "id")] == [*map(str, range(len(texts)))]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("array.json", json.dumps(ROWS)),
        ("pretty.json", "\n\n" + json.dumps(ROWS, indent=2) + "\n"),
        ("marked.json", "\ufeff" + json.dumps(ROWS, ensure_ascii=False)),
        ("lines.json", "\n\n".join(map(json.dumps, ROWS))),
        ("lines.ndjson", "\r\n".join(map(json.dumps, ROWS))),
    ],
)
def test_json_records(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert [*tables.texts(tmp_path / name, "text")] == [row["text"] for row in ROWS]


@pytest.mark.parametrize("content", ['{"a": 1}', '{\n  "a": {\n    "b": 1\n  }\n}\n', '["a", "b"]', ""])
def test_other_json_is_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "package.json").write_text(content)
    assert not tables.is_table(tmp_path / "package.json")


def test_tables_without_rows(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", "\n"), ("b.csv", "text\n"), ("c.tsv", ""), ("d.json", "[ ]")):
        (tmp_path / name).write_text(content)
        assert [*tables.texts(tmp_path / name, "text")] == []


def test_a_date_and_a_number_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "2020-01-01"}\n{"text": 1.5}\n{"text": true}\n')
    assert [*tables.texts(tmp_path / "a.jsonl", "text")] == ["2020-01-01", "1.5", "true"]


def test_what_a_folder_leaves_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "b.png").write_bytes(b"PNG\0" * 100)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "d").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    corpus = load_corpus([str(tmp_path)], seq_len=8)
    names = [(name.split("'")[1].rpartition("/")[2], name.rpartition("(")[2]) for name in corpus.left_out]
    assert names == [
        ("loop", "a link to a folder)"),
        ("b.png", "a binary file)"),
        ("c.txt.gz", "compressed by gzip)"),
        ("d", "no file, or a broken link)"),
    ]
    assert corpus.description().endswith("(compressed by gzip) and 1 more")
