"""Documentation points at what exists: links, headings, files, and the functions that docs/design.md walks through."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch

import memkern
from tests.support.helpers import needs_cpp

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("memkern/", "csrc/", "tests/", "benchmarks/", "lab/", "docs/", "examples/")


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_are_there(page: Path) -> None:
    # A file that a page names in words or as code, beside those that a build writes.
    named = {
        name.rstrip(".")
        for name in re.findall(r"(?<![\w./-])[\w./-]+", page.read_text())
        if name.startswith(FOLDERS) and not re.search("TOPIC|NAME", name)
    }
    written = {"memkern/libmemkern.so", "memkern/_host", "memkern/_saved"}
    missing = sorted(name for name in named - written if not (ROOT / name).exists())
    assert not missing


def test_the_site_has_every_page() -> None:
    pages = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {"overview.md", "contributing.md", "changelog.md"}  # by docs/hooks.py, from the root's
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {*pages} == there | written


def test_the_layout_names_every_top_folder() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    layout = text[text.index("## Layout") : text.index("## Ops")]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"the tests do not run from a git checkout: {listed.stderr.strip()}")
    folders = {name.partition("/")[0] for name in listed.stdout.splitlines() if "/" in name}
    assert not [name for name in folders if not re.search(rf"(?m)(^|, ){re.escape(name)}/", layout)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_api_reference_has_every_public_name() -> None:
    listed = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        listed |= {*re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
    modules = (memkern, memkern.optim, memkern.nn, memkern.planner, memkern.train)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    for name in listed:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("memkern.integrations"):  # which import the frameworks
            assert hasattr(importlib.import_module(module), attribute), name
    # Modules have pages of their own, and what is public twice is listed once.
    twice = {f"memkern.nn.{name}" for name in ("compress", "restore")} | {"memkern.planner.plan"}
    missing = {name for name in public - listed - twice if not isinstance(_found(name), (ModuleType, str))}
    assert not missing


def _found(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


TEXT = (ROOT / "docs" / "design.md").read_text()
STEP = TEXT[TEXT.index("## From optimizer.step()") : TEXT.index("## Launches")]
GELU = TEXT[TEXT.index("## Activations and linear layers") : TEXT.index("## Saved tensors")]
SAVED = TEXT[TEXT.index("## Saved tensors") : TEXT.index("## Checking GPU code")]


def walk(section: str) -> list[tuple[str, str, str]]:
    """The rows of a section's table: number, file, functions."""
    return re.findall(r"^\| (\d+) \| (\S+) \| ([^|]+) \|", section, re.MULTILINE)


def returns(files: list[str]) -> int:
    """How often a walk goes back to a file that it has left."""
    return sum(file in files[:i] and file != files[i - 1] for i, file in enumerate(files) if file.endswith(".py"))


@pytest.mark.parametrize("section", [STEP, GELU, SAVED], ids=["step", "gelu", "saved"])
def test_the_walk_names_functions_that_are_there(section: str) -> None:
    rows = walk(section)
    assert rows
    assert [int(number) for number, *_ in rows] == [*range(1, len(rows) + 1)]
    for _, file, functions in rows:
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{name}\(", (ROOT / file).read_text()), (file, name)


def called_by(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Each of memkern's Python functions that a call runs, in order: its file and name."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "memkern"):
            found.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@needs_cpp  # as the walk
def test_the_walk_names_every_python_function_of_a_step() -> None:
    p = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = memkern.optim.AdamW8bit([p])
    for _ in range(2):  # the first step makes states
        p.grad = torch.randn_like(p)
        called = {name for _, name in called_by(optimizer.step)}
    assert {"step", "_init_group", "step_"} <= called
    assert {name for name in called if not name.startswith("<")} <= {*re.findall(r"`(\w+)`", STEP)}


@needs_cpp
def test_the_walk_names_every_python_function_of_gelu() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    for _ in range(2):  # the first call makes the Activation
        called = called_by(lambda: memkern.functional.gelu(x))
    assert {name for _, name in called} <= {*re.findall(r"`(\w+)`", GELU)}
    files = [file for _, file, _ in walk(GELU)]
    assert {file for file, _ in called} - {"memkern/backend.py"} == {f for f in files if f.endswith(".py")}
    assert returns([file for file, _ in called]) == returns(files) == 2
