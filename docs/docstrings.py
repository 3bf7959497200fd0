"""For the API reference: docstrings have Sphinx's roles and ``::``, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


def _reference(match: re.Match[str]) -> str:
    name = match[1]
    return f'<autoref identifier="{name}" optional><code>{name}</code></autoref>'


def markdown(docstring: str) -> str:
    text = ROLE.sub(_reference, docstring)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Roles become links where the reference has the name, and ``::`` before an indented block a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
