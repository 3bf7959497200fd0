"""timm's optimizers without the rest of timm: they need torch alone, while `import timm` needs a torchvision."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "_timm_optim"


def load(cls: str) -> Any:
    """A class of the module of timm.optim that has its name in lower case. ModuleNotFoundError without timm."""
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'timm'")
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(found.origin).parent / "optim")]
        sys.modules[PACKAGE] = package
    return getattr(importlib.import_module(f"{PACKAGE}.{cls.lower()}"), cls)
