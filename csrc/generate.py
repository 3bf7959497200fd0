"""Writes the headers that come from Python's tables. setup.py calls it, and tests that compile csrc/ by themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

CSRC = Path(__file__).parent
# Header -> the Python file that knows it, and the function there that returns its text.
HEADERS = {
    "core/tables.h": ("memkern/quant/codec.py", "c_header"),
    "core/hyperparameters.h": ("memkern/schemas.py", "hyperparameters_header"),
    "common/schemas.h": ("memkern/schemas.py", "schemas_header"),
}


def write_headers(folder: Path = CSRC) -> None:
    """Writes those whose text has changed, so that nothing else is compiled anew."""
    for name, (source, function) in HEADERS.items():
        text = runpy.run_path(str(CSRC.parent / source))[function]()
        header = folder / name
        if not header.exists() or header.read_text() != text:
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)


if __name__ == "__main__":
    write_headers()
