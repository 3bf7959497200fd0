"""Documentation points at what exists: links, headings, files, and the functions that docs/design.md walks through."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("memkern/", "csrc/", "tests/", "benchmarks/", "docs/")


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
    for folder in ("memkern", "csrc", "tests", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".md"):
                found = [word for word in words if word in path.read_text()]
                assert not found, (path, found)


def test_the_walk_names_functions_that_are_there() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\S+) \| ([^|]+) \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, *_ in rows] == [*range(1, len(rows) + 1)]
    assert rows
    for _, file, functions in rows:
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{name}\(", (ROOT / file).read_text()), (file, name)
