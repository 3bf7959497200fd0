"""Which top folder imports which: the library and its tests stand without the lab."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"memkern", "benchmarks", "lab", "tests", "tools", "examples"}
ALLOWED = {
    "memkern": {"memkern"},
    "tests": {"memkern", "tests"},
    "benchmarks": {"memkern", "benchmarks", "tests"},  # of tests, support alone
    "examples": {"memkern"},
    "tools": {"memkern", "tools"},
    "docs": {"memkern"},
    "lab": FOLDERS,
}


def imported(path: Path) -> Iterator[str]:
    """Modules of this repository that a file imports, or runs by `-m`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Programs that tests run in another process.
            yield from re.findall(r"(?:^|; |\n)\s*(?:from|import) ([a-z][\w.]*)", node.value)
        elif isinstance(node, (ast.List, ast.Tuple)):
            words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
            yield from (str(name) for option, name in itertools.pairwise(words) if option == "-m")


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_what_it_may(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imported(path)
        if name.split(".")[0] in FOLDERS - ALLOWED[folder]
    ]
    assert not wrong


def test_of_the_tests_only_support_is_imported_elsewhere() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("benchmarks", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imported(path)
        if name.startswith("tests.") and not name.startswith("tests.support")
    ]
    assert not wrong
