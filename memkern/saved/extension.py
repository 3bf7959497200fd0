"""Whether the hooks of saved tensors are those in C++ (memkern._saved) or those in Python, their specification.

The extension is compiled for one build of torch, whose C++ interface is another one in every version. It carries a
stamp with torch's version and commit and a hash of the Python files that it follows, which is read from the file before
that is loaded. Where the stamp fits it is used, unless MEMKERN_SAVED=python asks for Python's hooks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path

import torch

from .._version import __version__
from . import built_for

_PACKAGE = __name__.rpartition(".")[0]
_EXTENSION = f"{_PACKAGE.rpartition('.')[0]}._saved"
CHOICES = ("python", "native")
_MARK = "memkern._saved for "


def stamp() -> str:
    """Of this memkern and this torch, as the extension that was compiled for them has it."""
    return f"{_MARK}{built_for.stamp(__version__, torch.__version__, torch.version.git_version)};"


def _why_not(file: Path) -> str | None:
    """Why an extension is not for this torch, or None."""
    found = re.search(re.escape(_MARK).encode() + rb"([^;\0]*);", file.read_bytes())
    if found and found[0].decode() == stamp():
        return None
    built = found[1].decode(errors="replace") if found else "another memkern"
    wanted = stamp().removeprefix(_MARK).removesuffix(";")
    return (
        f"memkern._saved was built for {built}, and this is {wanted} (memkern/sources/torch/commit); reinstall memkern"
    )


@functools.cache
def missing() -> str | None:
    """Why Python's hooks are used, or None where those of C++ are.

    Raises:
        ValueError: MEMKERN_SAVED is neither python nor native.
    """
    choice = os.environ.get("MEMKERN_SAVED", "native")
    if choice not in CHOICES:
        raise ValueError(f"MEMKERN_SAVED must be python or native, got {choice!r}")
    if choice == "python":
        return "MEMKERN_SAVED=python asks for them"
    spec = importlib.util.find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        return built_for.too_old(torch.__version__) or (
            "memkern._saved was not built; the messages of the installation say why"
        )
    if reason := _why_not(Path(spec.origin)):
        return reason
    try:
        importlib.import_module(f"{_PACKAGE}.native")
    except Exception as error:
        return f"memkern._saved does not load ({type(error).__name__}: {error})"
    return None
