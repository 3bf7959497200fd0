"""Files as people have them, and what is wrong with each: one table of kinds and messages, for bytes and for tokens."""

import json
import os
from pathlib import Path

import pytest

from memkern import OptionError
from memkern.__main__ import main
from memkern.train import TrainConfig, build
from tests.support.corpora import REFUSED, TAKEN, TEXT

TOKENS = pytest.param("tokens", marks=pytest.mark.full)


@pytest.fixture(params=["bytes", TOKENS])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run in ``tmp_path`` on bytes, or on the tokens of a model of transformers."""
    monkeypatch.chdir(tmp_path)
    if request.param == "bytes":
        return TrainConfig(model="byte-tiny", seq_len=16)
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(transformers.GPT2Config(**sizes).to_dict()))
    return TrainConfig(model="model", from_config=True, bytes=True, seq_len=16)


def write(name: str, content: object) -> None:
    content = content() if callable(content) else content
    if name:
        Path(name).write_bytes(content if isinstance(content, bytes) else str(content).encode())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_line_names_file_row_and_reason(config: TrainConfig, kind: str) -> None:
    name, content, message = REFUSED[kind]
    write(name, content)
    with pytest.raises(OptionError) as caught:
        build.load(config.replace(data=(name or "absent",)))
    assert str(caught.value).replace(f"{Path.cwd()}/", "").startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_read(config: TrainConfig, kind: str) -> None:
    write(*TAKEN[kind])
    corpus = build.load(config.replace(data=(".",) if config.is_preset else (TAKEN[kind][0],))).corpus
    assert min(len(corpus.train), len(corpus.validation)) > 16
    assert not {*b'{"\xef'} & {*corpus.train.tolist()}, "the text of the fields alone"


@pytest.mark.parametrize("kind", ["UTF-16", "UTF-16 of Chinese", "UTF-16 without a mark"])
def test_utf_16_is_not_missed_in_a_folder(config: TrainConfig, kind: str) -> None:
    Path("texts").mkdir()
    write("texts/first.txt", TEXT)
    write("texts/second.txt", REFUSED[kind][1])
    with pytest.raises(OptionError, match=r"'texts/second\.txt' given, text in UTF-16") as caught:
        build.load(config.replace(data=("texts",)))
    assert caught.value.name == "data"


def test_links_in_a_circle_and_files_that_may_not_be_read(config: TrainConfig) -> None:
    Path("texts").mkdir()
    write("texts/a.txt", TEXT)
    Path("texts/self").symlink_to("self")
    Path("texts/up").symlink_to("..", target_is_directory=True)
    assert len(build.load(config.replace(data=("texts",))).corpus.left_out) == 2
    with pytest.raises(OptionError, match="'texts/self' given, which is neither a file nor a folder"):
        build.load(config.replace(data=("texts/self",)))
    Path("texts/a.txt").chmod(0)
    if os.access("texts/a.txt", os.R_OK):
        pytest.skip("this user reads and writes everything")
    for name in ("texts", "texts/a.txt"):
        with pytest.raises(OptionError, match=r"cannot be read: .*Permission denied"):
            build.load(config.replace(data=(name,)))


@pytest.mark.parametrize("kind", ["half a surrogate", "5,000 digits", "100,000 brackets"])
def test_the_command_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(*REFUSED[kind][:2])
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", "a.jsonl", "--seq-len", "16", "--steps", "1", "--device", "cpu"])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.replace(f"{tmp_path}/", "").startswith(
        "python -m memkern train: error: argument --data: row 4 (line 4) of 'a.jsonl'"
    )
