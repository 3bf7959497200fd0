"""What the README and docs/ show runs: Python, commands, and excerpts of sources.

A page's Python blocks run in order and share their names, as a reader would type them; what a page takes for granted
(a model, a batch) is made here.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from tests.support import timm_factory

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m|make|torchrun) [^`]+)`")


def blocks(page: Path, *languages: str) -> Iterator[tuple[str | None, str]]:
    """Title and text of each block in one of the languages."""
    for _, language, title, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield title or None, textwrap.dedent(text)


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for _, language, _, text in FENCE.findall(page.read_text()):
            command = re.search(r"^\s*(\$ |python |pip |make |torchrun )", text, re.MULTILINE)
            assert not command or language == "bash", (page.name, text)


# Python


def tiny(name: str) -> Any:
    """A model of transformers with random weights, and a batch for it."""
    transformers = pytest.importorskip("transformers")
    if name == "llama":
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
        config = transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(64, (2, 32))
    return model, {"input_ids": tokens, "labels": tokens}


def saved_tensors() -> dict[str, Any]:
    model, batch = tiny("llama")
    return {"model": model, "batch": batch}


def does_not_fit() -> dict[str, Any]:
    model, batch = tiny("gpt2")
    inner = model.forward

    def forward(tokens: torch.Tensor) -> Any:  # a model of one's own: tokens in, loss out
        return inner(input_ids=tokens, labels=tokens).loss

    model.forward = forward
    return {"model": model, "batches": [batch["input_ids"]] * 2, "tokens": batch["input_ids"]}


def several_processes() -> dict[str, Any]:
    model = torch.nn.Sequential()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    return {"model": model}


def frameworks() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    timm_factory.load()
    timm = pytest.importorskip("timm")
    pytest.importorskip("timm.optim")
    model, batch = tiny("gpt2")
    args = transformers.TrainingArguments(
        output_dir="out", max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    rows = [{name: tensor[0] for name, tensor in batch.items()}] * 16
    return {
        "Trainer": transformers.Trainer,
        "model": model,
        "args": args,
        "data": rows,
        "batch": batch,
        "timm": timm,
    }


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "saved-tensors.md": saved_tensors,
    "what-does-not-fit.md": does_not_fit,
    "several-processes.md": several_processes,
    "frameworks.md": frameworks,
}
SLOW = {
    "saved-tensors.md",
    "what-does-not-fit.md",
    "several-processes.md",
    "frameworks.md",
    "getting-started.md",
}
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.full if page.name in SLOW else (), id=page.name)
    for page in PAGES
    if any(title is None for title, _ in blocks(page, "python"))
]


@pytest.fixture
def one_process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """torch.distributed with this process alone, for the page that shards."""
    if request.node.callspec.params["page"].name != "several-processes.md":
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_PYTHON)
@pytest.mark.filterwarnings("ignore")
def test_python_runs(page: Path, one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "memkern": memkern, **GIVEN.get(page.name, dict)()}
    for title, text in blocks(page, "python"):
        if title is None:
            device = text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"')
            exec(compile(device, str(page), "exec"), names)


def test_figures_of_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/getting-started.md prints bytes; its comments say which."""
    page = ROOT / "docs" / "getting-started.md"
    names: dict[str, Any] = {}
    for _, text in [*blocks(page, "python")][:3]:
        exec(compile(text, str(page), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"print\(.*\)  # ([\d.,]+)", page.read_text())
    assert [float(number.replace(",", "")) for number in said] == [
        pytest.approx(float(line), abs=0.005) for line in (printed[0], printed[1], printed[-1])
    ]


# excerpts


@pytest.mark.parametrize("page", [ROOT / "docs" / "kernels.md"], ids=lambda page: page.name)
def test_excerpts_are_those_of_the_files(page: Path) -> None:
    excerpts = [(title, text) for title, text in blocks(page, "python", "cpp", "cuda") if title]
    assert len(excerpts) > 5
    for title, text in excerpts:
        lines = [line.strip() for line in text.splitlines()]
        source = [line.strip() for line in (ROOT / title).read_text().splitlines()]
        places = [i for i, line in enumerate(source) if line == lines[0]]
        assert any(source[i : i + len(lines)] == lines for i in places), (title, text)


# commands


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in a block."""
    for _, text in blocks(page, "bash"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
                del words[0]
            if words:
                yield words


IN_BLOCKS = {shlex.join(words): words for page in PAGES for words in commands(page)}


def test_commands_name_what_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    inline = {text for page in PAGES for text in INLINE.findall(page.read_text())}
    found = [*IN_BLOCKS.values(), *(shlex.split(" ".join(text.split())) for text in sorted(inline))]
    assert len(found) > 30
    for words in found:
        if words[0] == "make":
            assert not [w for w in words[1:] if "=" not in w and w not in targets], words
        elif words[0] == "pip":
            for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
                assert extra in extras, words
        elif "-m" in words:
            module = words[words.index("-m") + 1]
            if module != "build":  # an installer of its own
                assert importlib.util.find_spec(module) is not None, words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), words
        else:
            assert words[0] in ("torchrun", "."), words


SMALL = [
    *("--seq-len", "32", "--batch-size", "2", "--device", "cpu", "--eval-every", "2", "--eval-tokens", "128"),
]
BYTES = ["--layers", "2", "--heads", "2", "--width", "64"]
MEMKERN = [words[words.index("memkern") + 1 :] for text, words in IN_BLOCKS.items() if "-m memkern" in text]


def run(main: Callable[[list[str]], None], arguments: list[str]) -> Any:
    """Its exit status."""
    try:
        main(arguments)
    except SystemExit as done:
        return done.code
    return 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_commands_of_memkern_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, in a folder with the files that they name, with small sizes added; torchrun's in one process."""
    pytest.importorskip("rich")
    from memkern.__main__ import main

    monkeypatch.chdir(tmp_path)
    model, _ = tiny("gpt2")
    model.save_pretrained("folder")
    model.config.save_pretrained("gpt2-xl")
    Path("my_texts").mkdir()
    Path("my_texts/text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    rows = [f"{text} {i},{mood}" for i in range(10) for text, mood in (("fine", "good"), ("awful", "bad"))]
    Path("rows.csv").write_text("\n".join(["text,mood", *rows]))
    assert len(MEMKERN) > 8
    for command in MEMKERN:
        added: list[str] = []
        if command[0] == "plan":
            added = ["--model", "distilgpt2", "--seq-len", "64", "--device", "cpu"]
        elif command[0] == "train" and "--resume" not in command:
            of_bytes = not {"gpt2-xl", "folder/"} & {*command}
            added = [*SMALL, *(BYTES if of_bytes else [])]
            added += ["--epochs", "1"] if "--epochs" in command else ["--steps", "3"]
            added += ["--data", "my_texts"] if "--data" not in command else []
            added += ["--warmup-epochs", "0.001"] if "--warmup-epochs" in command else []
        done = run(main, [*command, *added])
        assert not done, command


@pytest.mark.full
def test_benchmarks_take_the_arguments_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    modules = {words[2]: words[3:] for words in IN_BLOCKS.values() if words[:2] == ["python", "-m"]}
    for name, arguments in modules.items():
        if name == "benchmarks.roberta":  # fake CUDA is there before torch, in a process of its own
            subprocess.run([sys.executable, "-m", name, *arguments, "--help"], cwd=ROOT, check=True)
        elif name.split(".")[0] == "benchmarks":
            module = importlib.import_module(f"{name}.__main__" if name == "benchmarks" else name)
            with pytest.raises(SystemExit) as done:
                module.main([*arguments, "--help"])
            assert done.value.code == 0, name
