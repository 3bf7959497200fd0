"""python tools/release.py version REF: whether a tag such as refs/tags/v0.1.0 is that of memkern/_version.py.

The version stands there alone: pyproject.toml reads it, and CHANGELOG.md and CITATION.cff must name the same. Of a ref
that is no tag only these are checked. Needs nothing but the standard library.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    found: str = runpy.run_path(str(ROOT / "memkern" / "_version.py"))["__version__"]
    return found


def problems(ref: str) -> list[str]:
    """The faults of a release under this ref."""
    own = version()
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited
    assert newest
    found = []
    if cited[1] != own:
        found.append(f"CITATION.cff has version {cited[1]}, memkern/_version.py {own}")
    if newest[1] != own:
        found.append(f"CHANGELOG.md begins with {newest[1]}, memkern/_version.py has {own}")
    if ref.startswith("refs/tags/"):
        if ref != f"refs/tags/v{own}":
            found.append(f"the tag is {ref.removeprefix('refs/tags/')}, memkern/_version.py has {own}")
        if "not released" in newest[2]:
            found.append(f"CHANGELOG.md says of {newest[1]} that it is not released")
    return found


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] != "version":
        print("usage: python tools/release.py version REF", file=sys.stderr)
        return 2
    found = problems(argv[1])
    print("\n".join(found) or version(), file=sys.stderr if found else sys.stdout)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
