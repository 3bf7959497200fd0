"""memkern.train's data: texts read from files and folders, their tokens, and the windows of steps and of validation."""

import json
from pathlib import Path

import pytest
import torch

from memkern.train import Corpus, TrainConfig, load_corpus
from memkern.train.data import standard_library_files
from tests.support.train_helpers import SMALL, tiny_tokenizer


@pytest.mark.parametrize("field", ["text", "body"])
def test_rows_of_json_lines(tmp_path: Path, field: str) -> None:
    """Every tenth row is for validation; blank lines, a byte order mark and Unicode line separators change nothing."""
    rows = [{"id": i, "text": f"row {i}, \u00e9\u2028", "body": f"body {i}"} for i in range(1, 21)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    corpus = load_corpus([str(tmp_path)], seq_len=8, text_field=field)
    texts = [row[field] for row in rows]
    assert bytes(corpus.validation.tolist()).decode().split("\n") == [texts[9], texts[19]]
    assert bytes(corpus.train.tolist()).decode().split("\n") == [*texts[:9], *texts[10:19]]


def test_a_folder_gives_the_texts_of_its_files(tmp_path: Path) -> None:
    """The tail of every text is for validation."""
    for name in ("z/last.txt", "a/one.py", ".git/config", "a/.hidden", "two.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name * 100)
    (tmp_path / "image").write_bytes(b"PNG\0" * 100)
    (tmp_path / "latin").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    paths = [str(tmp_path), str(tmp_path / "a" / "one.py")]  # the second a duplicate
    corpus = load_corpus(paths, seq_len=8)
    texts = [(name * 100).encode() for name in ("two.txt", "a/one.py", "z/last.txt")]
    cuts = [90 * len(text) // 100 for text in texts]
    assert bytes(corpus.train.tolist()) == b"\n".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    assert bytes(corpus.validation.tolist()) == b"\n".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    assert corpus.files == 3
    assert [Path(path).name for path in corpus.left_out] == ["image", "latin", "table.csv"]
    assert "(3 files)" in corpus.description()
    assert "left out as no text: " in corpus.description()
    assert load_corpus(paths, seq_len=8).digest == corpus.digest
    (tmp_path / "two.txt").write_text("three.tx" * 100)
    assert load_corpus(paths, seq_len=8).digest != corpus.digest


def test_the_default_text_is_the_standard_library() -> None:
    files = standard_library_files()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not [path for path in files if {"site-packages", "test", "tests"} & set(path.parts[-4:-1])]
    assert sum(path.stat().st_size for path in files) > 3_000_000


def test_each_document_ends_with_the_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is cut; the end token is after each document, and nowhere else."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("memkern.train.data.CHARACTERS", 20)
    tokenizer = tiny_tokenizer()
    texts = ["one line\ntwo lines\nthree lines\nfour", "x" * 50, "y" * 40]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, *texts * 3]))
    ids = load_corpus([str(tmp_path)], seq_len=8, tokenizer=tokenizer).train
    assert ids.dtype == torch.int32
    ends = ids == tokenizer.eos_token_id
    assert ends.sum() == 11  # of 12, as every tenth is for validation
    assert tokenizer.decode(ids[: ends.nonzero()[2]][~ends[: ends.nonzero()[2]]]) == "".join(texts)


def test_batches_depend_on_seed_and_step_alone(corpus: Corpus) -> None:
    config = SMALL.replace(accumulation=2, micro_batch=3, seed=1)

    def inputs(step: int = 5, **changes: int) -> torch.Tensor:
        batches = corpus.step(config.replace(**changes), step)
        assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in batches)
        return torch.cat([inputs for inputs, _ in batches])

    assert torch.equal(inputs(), inputs())
    assert not torch.equal(inputs(), inputs(6))
    assert not torch.equal(inputs(), inputs(seed=2))
    assert torch.equal(inputs(), inputs(accumulation=1, micro_batch=6))
    assert len(inputs().unique(dim=0)) == 6


def test_windows_reach_the_last_byte() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    corpus = Corpus(text, text, "ten")
    steps = [corpus.step(TrainConfig(seq_len=8), step) for step in range(40)]
    assert {x for [(inputs, _)] in steps for x in inputs[:, 0].tolist()} == {0, 1}


def test_validation_windows_are_apart_and_spread() -> None:
    text = (torch.arange(1000) % 251).to(torch.uint8)
    batches = Corpus(text, text, "text").validation_batches(TrainConfig(seq_len=40, eval_tokens=400, micro_batch=3))
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 3, 1]
    expected = torch.arange(10) * 24 // 10 * 40  # 10 of the 24 windows that fit
    assert torch.equal(torch.cat([inputs[:, 0] for inputs, _ in batches]), expected % 251)
