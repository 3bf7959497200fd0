"""A clean copy of the source tree, for the tests that build it, and the libraries that setup.py builds of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cache

ROOT = cache.ROOT


def copy_of_tree(to: Path) -> Path:
    """Copies what git would commit, so nothing that was built, and returns ``to``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip(f"the tests do not run from a git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # git still lists files that were deleted
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def built_libraries(name: str, environment: dict[str, str], extra: dict[str, str] | None = None) -> Path:
    """A folder with the libraries that setup.py builds with these variables set, and these files added to the tree."""

    def build(folder: Path) -> None:
        tree = copy_of_tree(folder / "tree")
        for path, text in (extra or {}).items():
            (tree / path).write_text(text)
        result = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tree, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-4000:]
        (folder / "libraries").mkdir()
        for library in (tree / "memkern").glob("*.so"):
            shutil.move(library, folder / "libraries")
        shutil.rmtree(tree)

    return cache.built(name, build, environment, extra) / "libraries"
