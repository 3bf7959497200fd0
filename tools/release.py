"""Checks a release's version, and writes the repository's address into a build. Needs the standard library alone.

python tools/release.py version REF: checks that a tag such as refs/tags/v0.1.0 has the version of memkern/_version.py,
and that CHANGELOG.md and CITATION.cff name the same (pyproject.toml reads _version.py). For a REF that is no tag only
these two files are checked.

python tools/release.py links URL REF: writes the repository's address into README.md and pyproject.toml, to build
from and not to commit. A package index shows the README without the repository, where relative links lead nowhere.

docs/releasing.md has the whole way to a release.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    current: str = runpy.run_path(str(ROOT / "memkern" / "_version.py"))["__version__"]
    return current


def problems(ref: str) -> list[str]:
    """The faults of a release under this ref."""
    current = version()
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited
    assert newest
    faults = []
    if cited[1] != current:
        faults.append(f"CITATION.cff has version {cited[1]}, memkern/_version.py {current}")
    if newest[1] != current:
        faults.append(f"CHANGELOG.md begins with {newest[1]}, memkern/_version.py has {current}")
    if ref.startswith("refs/tags/"):
        if ref != f"refs/tags/v{current}":
            faults.append(f"the tag is {ref.removeprefix('refs/tags/')}, memkern/_version.py has {current}")
        if "not released" in newest[2]:
            faults.append(f"CHANGELOG.md says of {newest[1]} that it is not released")
    return faults


def with_links(text: str, url: str, ref: str) -> str:
    """The README with absolute links to the repository at a tag or branch: pages of files and folders, raw pictures."""
    name = ref.removeprefix("refs/tags/").removeprefix("refs/heads/")

    def absolute(match: re.Match[str]) -> str:
        exclamation, label, target = match.groups()
        page = "tree" if (ROOT / target.split("#")[0]).is_dir() else "blob"
        return f"{exclamation}[{label}]({url}/{'raw' if exclamation else page}/{name}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


def with_urls(project: str, url: str) -> str:
    """pyproject.toml with the addresses that an index shows beside the page."""
    addresses = {"Repository": url, "Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"}
    urls = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
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
    faults = problems(argv[1])
    print("\n".join(faults) or version(), file=sys.stderr if faults else sys.stdout)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
