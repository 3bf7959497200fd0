"""The README's and docs' snippets run as they are printed: Python, commands, and excerpts of sources.

A page's Python blocks are pasted one after another into an interpreter without names.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import timm_factory
from tests.support.train_helpers import tiny_tokenizer

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
            yield title or None, text


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for _, language, _, text in FENCE.findall(page.read_text()):
            command = re.search(r"^\s*(\$ |python |pip |make |torchrun )", text, re.MULTILINE)
            assert not command or language == "bash", (page.name, text)


# Python


def tiny_gpt2() -> Any:
    """A model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=300, n_positions=128, n_embd=64, n_layer=2, n_head=2)
    )


NEEDS = {
    "frameworks.md": ("transformers", "accelerate", "lightning", "timm"),
    "what-does-not-fit.md": ("transformers",),
}
SLOW = {"what-does-not-fit.md", "several-processes.md", "frameworks.md", "getting-started.md"}
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.full if page.name in SLOW else (), id=page.name)
    for page in PAGES
    if any(title is None for title, _ in blocks(page, "python"))
]


@pytest.mark.parametrize("page", WITH_PYTHON)
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.filterwarnings("ignore")
def test_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.name == "compiled.md":
        request.getfixturevalue("can_compile")
    if page.name == "frameworks.md" and importlib.util.find_spec("timm"):
        timm_factory.load()  # where torchvision is absent
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for title, text in blocks(page, "python"):
        if title is None:
            exec(compile(text, str(page), "exec"), names)


def test_figures_of_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes that docs/getting-started.md prints are those in its comments."""
    page = ROOT / "docs" / "getting-started.md"
    names: dict[str, Any] = {}
    for _, text in [*blocks(page, "python")][:3]:
        exec(compile(text, str(page), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    documented = re.findall(r"print\(.*\)  # ([\d.,]+)", page.read_text())
    assert [float(number.replace(",", "")) for number in documented] == [
        pytest.approx(float(line), abs=0.005) for line in (printed[0], printed[1], printed[-1])
    ]


# ---- excerpts


@pytest.mark.parametrize("page", [ROOT / "docs" / "kernels.md"], ids=lambda page: page.name)
def test_excerpts_are_those_of_the_files(page: Path) -> None:
    excerpts = [(title, text) for title, text in blocks(page, "python", "cpp", "cuda") if title]
    assert len(excerpts) > 5
    for title, text in excerpts:
        lines = [line.strip() for line in text.splitlines()]
        source = [line.strip() for line in (ROOT / title).read_text().splitlines()]
        places = [i for i, line in enumerate(source) if line == lines[0]]
        assert any(source[i : i + len(lines)] == lines for i in places), (title, text)


# ---- commands


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in a block."""
    for _, text in blocks(page, "bash"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
                del words[0]
            if words:
                yield words


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IN_BLOCKS = {shlex.join(words): words for page in PAGES for words in commands(page)}


def test_commands_in_examples_are_those_of_a_page() -> None:
    lines = [line.strip() for path in EXAMPLES for line in path.read_text().splitlines()]
    commands_in_examples = [line for line in lines if line.startswith("python -m ")]
    assert commands_in_examples
    assert {*commands_in_examples} <= {*IN_BLOCKS}


def test_commands_name_what_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    inline = {text for page in PAGES for text in INLINE.findall(page.read_text())}
    all_commands = [*IN_BLOCKS.values(), *(shlex.split(" ".join(text.split())) for text in sorted(inline))]
    assert len(all_commands) > 30
    for words in all_commands:
        if words[0] == "make":
            assert not [w for w in words[1:] if "=" not in w and w not in targets], words
        elif words[0] == "pip":
            for names in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert {*names.split(",")} <= {*extras}, words
        elif "-m" in words:
            module = words[words.index("-m") + 1]
            if module != "build":  # an installer of its own
                assert importlib.util.find_spec(module) is not None, words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), words
        else:
            assert words[0] in ("torchrun", "."), words


# Arguments of `python -m memkern` on the pages, and those with models that are too large to build here.
MEMKERN = sorted({" ".join(words[words.index("memkern") + 1 :]) for words in IN_BLOCKS.values() if "memkern" in words})
LARGE = [command for command in MEMKERN if "gpt2-xl" in command or "llama-3.1-8b" in command]


@pytest.fixture
def as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs a command with its own arguments, in a folder with the files that it names, for 2 short steps."""
    from memkern.__main__ import main
    from memkern.train import cli

    monkeypatch.chdir(tmp_path)
    given, short = cli.given_options, {"steps": 2, "micro_batch": 1, "accumulation": 1, "warmup": 0, "eval_tokens": 256}
    monkeypatch.setattr(cli, "given_options", lambda args: given(args) | short)
    Path("my_texts").mkdir()
    Path("my_texts/text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 500)
    Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(600)))

    def run(command: str) -> None:
        try:
            status = main(shlex.split(command))
        except SystemExit as exit_:
            status = exit_.code
        assert not status, command

    return run


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_commands_run_as_printed(as_printed: Callable[[str], None]) -> None:
    tiny_gpt2().save_pretrained("folder")
    tiny_tokenizer().save_pretrained("folder")
    small = [command for command in MEMKERN if command not in LARGE]
    small.sort(key=lambda command: "--resume" in command)  # what is resumed is saved before
    assert len(small) > 6
    for command in small:
        as_printed(command)


class Planned(Exception):
    """Ends a command when its plan is made, before it builds the model."""


@pytest.mark.long
@pytest.mark.parametrize("command", LARGE)
@pytest.mark.filterwarnings("ignore")
def test_commands_for_large_models_run_up_to_the_plan(
    command: str, as_printed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan fits, and no model of 1.56 billion parameters or more is built."""
    if command.startswith("plan"):
        as_printed(command)
        return

    def no_trainer(*_: Any) -> None:
        raise Planned

    monkeypatch.setattr("memkern.train.cli.Trainer", no_trainer)
    with pytest.raises(Planned):
        as_printed(command)


@pytest.mark.full
def test_benchmarks_take_the_arguments_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    modules = {words[2]: words[3:] for words in IN_BLOCKS.values() if words[:2] == ["python", "-m"]}
    for name, arguments in modules.items():
        if name.split(".")[0] in ("benchmarks", "lab"):
            module = importlib.import_module(name)
            if hasattr(module, "__path__"):  # a package
                module = importlib.import_module(f"{name}.__main__")
            with pytest.raises(SystemExit) as exit_:
                module.main([*arguments, "--help"])
            assert exit_.value.code == 0, name
