"""Documentation points at what exists: links, headings, files, and the functions that docs/design.md walks through."""

import importlib
import re
import sys
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
    written = {"memkern/libmemkern.so", "memkern/_host"}
    missing = sorted(name for name in named - written if not (ROOT / name).exists())
    assert not missing


def test_nothing_cites_what_is_not_in_the_repository() -> None:
    words = ("DESIGN" + ".md", "FAC" + "TS", "/work/" + "shared")
    for folder in ("memkern", "csrc", "tests", "benchmarks", "lab", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".md"):
                found = [word for word in words if word in path.read_text()]
                assert not found, (path, found)


def test_the_site_has_every_page() -> None:
    pages = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {"overview.md", "contributing.md", "changelog.md"}  # by docs/hooks.py, from the root's
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {*pages} == there | written


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


def test_the_walk_names_functions_that_are_there() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\S+) \| ([^|]+) \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, *_ in rows] == [*range(1, len(rows) + 1)]
    assert rows
    for _, file, functions in rows:
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{name}\(", (ROOT / file).read_text()), (file, name)


@needs_cpp  # as the walk
def test_the_walk_names_every_python_function_of_a_step() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    section = text[text.index("## From optimizer.step()") : text.index("## Launches")]
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(ROOT / "memkern"):
            called.add(code.co_name)

    p = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = memkern.optim.AdamW8bit([p])
    for tracer in (None, note):  # the first step makes states
        p.grad = torch.randn_like(p)
        sys.setprofile(tracer)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    named = {*re.findall(r"`(\w+)`", section)}
    assert {"step", "_init_group", "step_"} <= called
    assert {name for name in called if not name.startswith("<")} <= named
