"""Hooks of mkdocs: adds pages from the repository's root, and pages for the files outside of docs/ that are linked to.

The pages are written to be read in the repository, where ``../memkern/backend.py`` is a link to a file. On the site
such a file is a page of its own below ``source/``, so that every link stays inside of the site and is checked.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LANGUAGES = {
    ".py": "python",
    ".h": "cpp",
    ".cpp": "cpp",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".csv": "text",
    ".json": "json",
}
_IMAGES = (".png", ".svg")


def on_config(config: Any) -> Any:
    """Sets the link to the repository to the page of git's remote ``origin``, where there is one."""
    git = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    remote = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    url = re.sub(r"^git@([^:]+):", r"https://\1/", remote).removesuffix(".git")
    if not config.repo_url and url.startswith("https://"):
        config.repo_url = url
        config.repo_name = "/".join(url.split("/")[-2:])
    return config


def _origin(src_uri: str) -> str:
    """The path in the repository of a page of the site."""
    for origin, page in ROOT_PAGES.items():
        if page == src_uri:
            return origin
    return f"docs/{src_uri}"


def _in_site(path: str) -> str:
    """The path on the site of a file of the repository."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(_IMAGES) else f"source/{path}.md"


def _targets(text: str, origin: str) -> set[str]:
    """The files of the repository that a page links to."""
    links = {link for _, link, *_ in LINK.findall(text) if not re.match(r"[a-z]+:", link)}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(origin), link)) for link in links}


def _source_page(path: str) -> str:
    """A file as a page, or a folder as the list of its files."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(p.name for p in full.iterdir() if not p.name.startswith(("_", ".")) and p.suffix != ".so")
        body = "\n".join(f"- {name}" for name in names)
    else:
        fence = "`" * 6
        body = f"{fence}{LANGUAGES.get(full.suffix, 'text')}\n{full.read_text().rstrip()}\n{fence}"
    return f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n# {path}\n\n{body}\n"


def on_files(files: Files, *, config: Any) -> Files:
    for origin, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    targets: set[str] = set()
    for file in files.documentation_pages():
        targets |= _targets(file.content_string, _origin(file.src_uri))
    for path in sorted(targets):
        site, full = _in_site(path), ROOT / path
        if not site.startswith("source/") or not full.exists():
            continue
        if path.endswith(_IMAGES):
            files.append(File.generated(config, site, abs_src_path=str(full)))
        else:
            page = File.generated(config, site, content=_source_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    page_path, origin = page.file.src_uri, _origin(page.file.src_uri)

    def with_site_path(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups()
        if re.match(r"[a-z]+:", link):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
        target = posixpath.relpath(_in_site(path), posixpath.dirname(page_path) or ".")
        return f"{before}{target}{anchor or ''}{after}"

    return LINK.sub(with_site_path, markdown)
