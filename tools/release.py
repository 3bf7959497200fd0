"""Checks a release's version, and writes the repository's address into a build. Needs the standard library alone.

python tools/release.py version REF: whether a tag such as refs/tags/v0.1.0 is that of memkern/_version.py. The version
stands there alone: pyproject.toml reads it, and CHANGELOG.md and CITATION.cff must name the same. Of a ref that is no
tag only these are checked.

python tools/release.py links URL REF: writes the repository's address into README.md and pyproject.toml, for a build
alone. A package index shows the README without the repository, where relative links lead nowhere.

docs/releasing.md has the whole way to a release.
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


def with_links(text: str, url: str, ref: str) -> str:
    """The README with whole links: to files of the repository at a tag or branch, and to pictures as they are."""
    name = ref.removeprefix("refs/tags/").removeprefix("refs/heads/")

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1] == "!" else "tree" if (ROOT / found[3].split("#")[0]).is_dir() else "blob"
        return f"{found[1]}[{found[2]}]({url}/{kind}/{name}/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", whole, text)


def with_urls(project: str, url: str) -> str:
    """pyproject.toml with the addresses that an index shows beside the page."""
    places = {"Repository": url, "Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"}
    urls = "".join(f'{name} = "{place}"\n' for name, place in places.items())
    after = "[project.optional-dependencies]\n"
    return project.replace(after, f"[project.urls]\n{urls}\n{after}", 1)


def write_links(url: str, ref: str) -> None:
    for name, change in (
        ("README.md", lambda text: with_links(text, url, ref)),
        ("pyproject.toml", lambda text: with_urls(text, url)),
    ):
        path = ROOT / name
        path.write_text(change(path.read_text()))


def main(argv: list[str]) -> int:
    if len(argv) == 3 and argv[0] == "links" and argv[1].startswith("https://"):
        write_links(argv[1].rstrip("/"), argv[2])
        return 0
    if len(argv) != 2 or argv[0] != "version":
        print("usage: python tools/release.py version REF | links https://... REF", file=sys.stderr)
        return 2
    found = problems(argv[1])
    print("\n".join(found) or version(), file=sys.stderr if found else sys.stdout)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
