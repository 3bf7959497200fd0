"""Turns Sphinx's roles and ``::`` in docstrings into Markdown, for the API reference (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


def markdown(docstring: str, package: str) -> str:
    """A docstring in Markdown. ``package``, such as memkern.optim, is put before names that have no module."""

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        full = name if "." in name else f"{package}.{name}"
        return f'<autoref identifier="{full}" optional><code>{name}</code></autoref>'

    text = ROLE.sub(reference, docstring)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Roles become links to names that the reference has, and ``::`` before an indented block becomes a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            package = ".".join(obj.path.split(".")[:2])
            obj.docstring.value = markdown(obj.docstring.value, package)
