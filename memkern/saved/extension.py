"""Whether the hooks of saved tensors are those in C++ (memkern._saved) or those in Python, their specification.

The extension is compiled for one build of torch, whose C++ interface is another one in every version. It carries a
stamp with torch's version and commit and a hash of the Python files that it follows, which is read from the file before
that is loaded. It is young, so it is used where MEMKERN_SAVED=native asks for it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import re
from pathlib import Path

import torch

from .._version import __version__

_PACKAGE = __name__.rpartition(".")[0]
_EXTENSION = f"{_PACKAGE.rpartition('.')[0]}._saved"
CHOICES = ("python", "native")
_MARK = "memkern._saved for "
_LEAST_TORCH = (2, 13)  # as in setup.py


def sources_hash(folder: Path) -> str:
    """Of the files of memkern/saved, whose rules the extension follows."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def stamp() -> str:
    """Of this memkern and this torch, as the extension that was compiled for them has it."""
    own = sources_hash(Path(__file__).parent)
    return f"{_MARK}{__version__}/{own}/{torch.__version__}/{torch.version.git_version};"


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
    choice = os.environ.get("MEMKERN_SAVED", "python")
    if choice not in CHOICES:
        raise ValueError(f"MEMKERN_SAVED must be python or native, got {choice!r}")
    if choice == "python":
        return "MEMKERN_SAVED=native asks for those in C++"
    spec = importlib.util.find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        if tuple(map(int, torch.__version__.split(".")[:2])) < _LEAST_TORCH:
            return "memkern._saved needs torch {}.{} or newer".format(*_LEAST_TORCH)
        return "memkern._saved was not built; the messages of the installation say why"
    if reason := _why_not(Path(spec.origin)):
        return reason
    try:
        importlib.import_module(f"{_PACKAGE}.native")
    except Exception as error:
        return f"memkern._saved does not load ({type(error).__name__}: {error})"
    return None
