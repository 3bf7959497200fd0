"""Writes nodes.inc from torch's own header: where each node of the autograd graph keeps what it has saved."""

from __future__ import annotations

import re
from pathlib import Path

FUNCTIONS = "torch/csrc/autograd/generated/Functions.h"


def nodes(header: str) -> list[str]:
    """A line for each node and saved tensor, or list of them, that a header declares."""
    lines = []
    for name, body in re.findall(r"^struct TORCH_API (\w+) : public \w+ \{\n(.*?)^\};", header, re.S | re.M):
        for kind, attribute in re.findall(r"^\s*(SavedVariable|std::vector<SavedVariable>) (\w+)_;", body, re.M):
            lines.append(f"{'SAVED' if kind == 'SavedVariable' else 'SAVED_LIST'}({name}, {attribute})")
    return lines


def write_nodes(includes: Path, target: Path) -> None:
    """includes: torch's folder of headers. Raises ValueError where they declare no such nodes."""
    lines = nodes((includes / FUNCTIONS).read_text())
    if not lines:
        raise ValueError(f"{FUNCTIONS} declares no nodes")
    text = "\n".join(("// Written by csrc/saved/generate.py from torch's headers.", *lines, ""))
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
