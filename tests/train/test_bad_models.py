"""Models, tokenizers and texts that cannot be used: a line that says what and what to do, and nothing written."""

import json
import os
from pathlib import Path

import pytest

from memkern.__main__ import main

transformers = pytest.importorskip("transformers")


def config(**options: object) -> str:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300} | options
    return json.dumps(transformers.GPT2Config(**sizes).to_dict())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes) -> None:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    write("text.txt", "The quick brown fox jumps over the lazy dog. " * 100)
    write("model/config.json", config())
    write("few/config.json", config(vocab_size=100))
    write("broken/config.json", "{")
    write("odd/config.json", json.dumps({"model_type": "no such type"}))
    write("code/config.json", json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}))
    write("code/evil.py", "raise SystemExit('this code must not run')")
    write("vit/config.json", json.dumps(transformers.ViTConfig().to_dict()))
    write("classes/config.json", config(architectures=["GPT2ForSequenceClassification"]))
    write("torn/config.json", config())
    write("4bit/config.json", config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}))
    write("8bit/config.json", config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}))
    write("fp8/config.json", config(quantization_config={"quant_method": "fp8"}))
    write("adapters/adapter_config.json", "{}")
    write("torn/model.safetensors", b"\x10\x00")
    write("folder/readme", "no model")
    write("full/file", "kept")
    return tmp_path


COMMON = ["--device", "cpu", "--seq-len", "16", "--batch-size", "2", "--steps", "2"]
MODEL = ["--model", "model", "--from-config", "--bytes"]
BAD = [
    (["--model", "folder"], "--model", "'folder': its configuration cannot be used", "save_pretrained"),
    (["--model", "text.txt"], "--model", "'text.txt': its configuration cannot be used", "save_pretrained"),
    (["--model", "no such/model/name"], "--model", "cannot be used", "byte-tiny"),
    (["--model", "nobody/has-this"], "--model", "cannot be used", "a folder that save_pretrained wrote"),
    (["--model", "nobody/has-this", "--from-config"], "--model", "cannot be used", "byte-tiny"),
    (["--model", "broken"], "--model", "configuration cannot be used"),
    (["--model", "odd"], "--model", "configuration cannot be used"),
    (["--model", "code"], "--model", "configuration cannot be used"),
    (["--model", "model", "--bytes"], "--model", "cannot be built", "model.safetensors"),
    (["--model", "model"], "--model", "a folder without a tokenizer", "--bytes"),
    (["--model", "torn", "--bytes"], "--model", "cannot be built"),
    (["--model", "vit", "--from-config", "--bytes"], "--model", "no causal language model"),
    (["--model", "classes", "--bytes"], "--model", "a sequence classifier", "a causal language model"),
    (["--model", "4bit", "--bytes"], "--model", "quantized (bitsandbytes)", "memkern.optim"),
    (["--model", "8bit", "--bytes"], "--model", "quantized (bitsandbytes)", "unquantized weights"),
    (["--model", "fp8", "--bytes"], "--model", "quantized (fp8)", "unquantized weights"),
    (["--model", "adapters"], "--model", "adapters of PEFT", "a whole model", "by PEFT with"),
    (["--model", "few", "--from-config", "--bytes"], "--bytes", "100", "256"),
    ([*MODEL, "--seq-len", "65"], "--seq-len", "65 given", "1 to 64"),
    ([*MODEL, "--width", "32"], "--width", "given with --model model", "byte-tiny"),
    ([*MODEL, "--export", "full"], "--export", "not empty", "a new or an empty folder"),
    ([*MODEL, "--export", "text.txt"], "--export", "nothing can be written in 'text.txt'"),
    ([*MODEL, "--out", "text.txt"], "--out", "nothing can be written in 'text.txt'"),
    ([*MODEL, "--fit", "3MiB"], "--fit", "3MiB given", "the least that could do"),
    ([*MODEL, "--fit", "2GiB", "--compare"], "--fit", "given with --compare", "without"),
    ([*MODEL, "--weights-on-host", "layers", "--offload"], "--offload", "True given", "on the host already"),
    ([*MODEL, "--loss-chunk", "-1"], "--loss-chunk", "-1 given", "1 or more"),
]


@pytest.mark.full
@pytest.mark.parametrize(("arguments", "name", "pieces"), [(a, n, p) for a, n, *p in BAD], ids=lambda x: " ".join(x))
def test_a_line_says_what_and_what_to_do(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    name: str,
    pieces: list[str],
) -> None:
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    data = [] if "--data" in arguments else ["--data", "text.txt"]
    output = [] if {"--out", "--export"} & {*arguments} else ["--out", "new"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *COMMON, *data, *output, *arguments])
    shown = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2, shown
    [line] = shown
    assert line.startswith(f"python -m memkern train: error: argument {name}: "), line
    assert all(piece in line for piece in pieces), line
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before
    assert not os.path.exists("new")


def test_a_checkpoint_of_another_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", *COMMON, "--data", "text.txt", *MODEL, "--save", "run.pt"])
    before = Path("run.pt").read_bytes()

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", "--resume", "run.pt", *arguments])
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    Path("other").mkdir()
    Path("other/config.json").write_text(config())
    assert "argument --model: other given; allowed: model, with which" in refused("--model", "other")
    Path("model/config.json").write_text(config(n_layer=2))
    assert "argument --resume: given a checkpoint of another model; allowed: one of model" in refused()
    assert Path("run.pt").read_bytes() == before
