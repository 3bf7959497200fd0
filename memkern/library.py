"""Names the file of the compiled library, and the namespace of its ops in torch.ops.

tools/hub_kernel.py puts another library.py into builds for the Hugging Face Hub, whose names must be unique.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("libmemkern.so")
NAMESPACE = "memkern"

PACKAGE = __name__.rpartition(".")[0]
"""The name of this package: memkern, or the name under which such a build was loaded."""


def is_own(cls: type) -> bool:
    """Whether a class is defined in memkern."""
    return cls.__module__.startswith(f"{PACKAGE}.")
