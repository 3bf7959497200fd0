"""No top folder imports one that it may not, so that the library and its tests need no lab."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"memkern", "benchmarks", "lab", "tests", "tools", "examples"}
ALLOWED = {  # folder: those that it may import
    "memkern": {"memkern"},
    "tests": {"memkern", "tests"},
    "benchmarks": {"memkern", "benchmarks", "tests"},  # of tests only tests/support, as the lab
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
def test_a_folder_imports_allowed_folders_only(folder: str) -> None:
    def allowed(name: str) -> bool:
        top, _, below = name.partition(".")
        if top == "tests" and folder != "tests":
            return top in ALLOWED[folder] and below.startswith("support")
        return top not in FOLDERS - ALLOWED[folder]

    files = sorted((ROOT / folder).rglob("*.py"))
    assert not [f"{path.relative_to(ROOT)}: {name}" for path in files for name in imported(path) if not allowed(name)]
