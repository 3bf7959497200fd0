"""timm's optimizers without the rest of timm: they need torch alone, while `import timm` needs a torchvision."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "_timm_optim"


def load(cls: str) -> Any:
    """An optimizer of timm: "Lamb" is the class Lamb of timm.optim.lamb. ModuleNotFoundError without timm."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'timm'")
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(spec.origin).parent / "optim")]
        sys.modules[PACKAGE] = package
    return getattr(importlib.import_module(f"{PACKAGE}.{cls.lower()}"), cls)
