"""What ``python -m memkern train`` refuses: one line with the option and what is allowed, and no file is written."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import backend
from tests.support.train_helpers import error_of_command, small_run_flags

OPTIONS = small_run_flags(layers=1, batch_size=2, steps=4)
WITHOUT_SIZES = OPTIONS[6:]  # without the model's layers, heads and width
WORDS = "The quick brown fox jumps over the lazy dog. "


def lines(odd: str = "", count: int = 300) -> bytes:
    """JSON lines of which the fourth is ``odd``."""
    rows = [json.dumps({"text": WORDS, "id": 1})] * count
    return "\n".join([*rows[:3], odd, *rows[3:]]).encode()


def gpt2(**options: Any) -> bytes:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300}
    return json.dumps({"model_type": "gpt2", **sizes} | options).encode()


FILES = {
    "text.txt": WORDS.encode() * 200, "texts/text.txt": WORDS.encode() * 200, "out/results.json": b"{}",
    "full/file": b"", "empty.txt": b"", "few.jsonl": lines(count=5), "latin.txt": ("caf\xe9 " * 300).encode("latin-1"),
    "binary": bytes(9000),
    "a.csv": b"text\n", "half.jsonl": lines('{"text": "\\ud83d"}'),
    "body.jsonl": lines('{"body": "b"}'), "model/config.json": gpt2(), "few/config.json": gpt2(vocab_size=100),
    "vit/config.json": b'{"model_type": "vit"}',
    "code/config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}',
    "code/evil.py": b"raise SystemExit('this code must not run')",
    "4bit/config.json": gpt2(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip
# arguments, or VARIABLE=value | the option that the error names | parts of the error's line, any number of them
REFUSED = """
WORLD_SIZE=2 | WORLD_SIZE | '2' given in the environment
MEMKERN_BACKEND=xx | MEMKERN_BACKEND | backend must be one of cpu, cuda
--steps 0 | --steps | 0 given | 1 or more
--steps many | --steps | invalid int value: 'many'
--seed 9223372036854775808 | --seed | 9223372036854775808 given | 0 to 9223372036854775807
--batch-size -3 | --batch-size | -3 given | 1 or more
--warmup 4 | --warmup | 4 given | fewer than the 4 steps
--heads 3 | --heads | 3 given | divisors of the width, 64
--bytes | --bytes | given with --model byte-tiny | models of transformers
--model gpt2 | --layers | given with --model gpt2 | byte-tiny
--step-in-backward --clip 1 | --clip | given with --step-in-backward | 0
--step-in-backward --batch-factor 2 | --batch-factor | 2 given with --accumulation 1 in 1 processes
--export new2 | --export | given with --model byte-tiny | models of transformers
--device toaster | --device | 'toaster' given | cpu, and cuda
--compare --optimizer lion --state-bits 32 | --compare | lion | with 8-bit states
--compare --save run.pt | --compare | --save | without
--fit lots | --fit | 'lots' given | 12GiB
--fit 2GiB --compare | --fit | given with --compare | without
--resume missing.pt | --resume | 'missing.pt' given, which cannot be read as a checkpoint | No such file
--resume objects.pt | --resume | 'objects.pt' given, which cannot be read as a checkpoint
--resume run.pt | --resume | 'run.pt' is no checkpoint of this version
--save texts | --save | a checkpoint, in an existing folder
--save null | --save | a checkpoint, in an existing folder
--save run.pt | --save | a checkpoint, in an existing folder
--save objects.pt | --save | a checkpoint, in an existing folder
--save archive.zip | --save | a checkpoint, in an existing folder
--save out/results.json --out out | --save | a checkpoint, in an existing folder
--save out/losses.png --out out | --save | where --out writes
--save new --out new | --save | where --out writes
--out text.txt | --out | nothing can be written in 'text.txt'
--data missing | --data | 'missing' cannot be read: No such file
--data binary | --data | binary' given; allowed: text in UTF-8 | a binary file
--data latin.txt | --data | latin.txt' given; allowed: text in UTF-8 | position 3
--data a.csv | --data | a.csv' given; allowed: text in UTF-8 | a .csv file
--data half.jsonl | --text-field | 'text' given | not in line 4 of | half.jsonl': UnicodeEncodeError
--data body.jsonl | --text-field | 'text' given | not in line 4 of | body.jsonl': KeyError
--data empty.txt | --seq-len | 0 tokens for training | more text
--data few.jsonl | --seq-len | 0 for validation | every tenth row
--model full | --model | 'full' given, whose configuration cannot be used | save_pretrained
--model code | --model | configuration cannot be used
--model model --bytes | --model | cannot be built | model.safetensors
--model model --from-config | --model | whose tokenizer cannot be used | --bytes | it knows no text
--model vit --from-config --bytes | --model | no causal language model
--model 4bit --bytes | --model | quantized | by PEFT
--model few --from-config --bytes | --bytes | 100 | 256
--model model --from-config --bytes --seq-len 65 | --seq-len | 65 given | 1 to 64
--model model --from-config --bytes --export full | --export | not empty | a new or an empty folder
--model model --from-config --bytes --width 32 | --width | given with --model model | byte-tiny
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a folder with FILES, a pipe, a link to /dev/null and two files that are no checkpoints."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    os.mkfifo("fifo")
    Path("null").symlink_to(os.devnull)
    torch.save({"weights": torch.zeros(3)}, "run.pt")
    torch.save({"optimizer": Path()}, "objects.pt")
    shutil.make_archive("archive", "zip", "texts")
    backend.from_environment.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    backend.from_environment.cache_clear()


def tree(folder: Path) -> dict[Path, Any]:
    """Every path with its kind and content."""
    modes = {path: path.lstat().st_mode for path in folder.rglob("*")}
    return {path: (mode, path.read_bytes() if stat.S_ISREG(mode) else None) for path, mode in modes.items()}


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_line_says_what_and_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    arguments, name, *parts = row.split(" | ")
    if not arguments.startswith("--"):
        monkeypatch.setenv(*arguments.split("="))
        arguments = ""
    before = tree(folder)
    options = WITHOUT_SIZES if "--model" in arguments and arguments != "--model gpt2" else OPTIONS
    data = [] if "--data" in arguments else ["--data", "text.txt"]
    output = [] if {"--out", "--export", "--save"} & {*arguments.split()} else ["--out", "new"]
    line = error_of_command(capsys, *data, *options, *output, *arguments.split())
    assert line.startswith(f"{name}: ")
    assert all(part in line for part in parts), line
    assert tree(folder) == before
