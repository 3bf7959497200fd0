"""For the API reference: docstrings have Sphinx's roles and ``::``, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


def markdown(docstring: str, package: str) -> str:
    """A docstring in Markdown. package: where a name without a module is, such as memkern.optim."""

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        full = name if "." in name else f"{package}.{name}"
        return f'<autoref identifier="{full}" optional><code>{name}</code></autoref>'

    text = ROLE.sub(reference, docstring)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Roles become links where the reference has the name, and ``::`` before an indented block a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            package = ".".join(obj.path.split(".")[:2])
            obj.docstring.value = markdown(obj.docstring.value, package)
