"""timm's optimizers and their factory where timm itself cannot be imported for lack of torchvision.

The factory is timm's code; the packages around it are made without running their __init__, and get the two names that
the factory imports from them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from typing import Any

# Packages, and for each the name that the factory imports from it and the module that defines that name.
NAMES = {
    "timm": None,
    "timm.layers": ("use_reentrant_ckpt", "timm.layers.config"),
    "timm.models": ("group_parameters", "timm.models._manipulate"),
}


def load() -> None:
    """Makes ``import timm.optim`` work. ModuleNotFoundError without timm."""
    if "timm" in sys.modules:
        return
    if find_spec("timm") is None:
        raise ModuleNotFoundError("No module named 'timm'")
    if find_spec("torchvision") is not None:
        return
    for name, imported in NAMES.items():
        spec = find_spec(name)
        assert spec is not None
        sys.modules[name] = package = module_from_spec(spec)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
        if imported is not None:
            setattr(package, imported[0], getattr(importlib.import_module(imported[1]), imported[0]))


def optimizer(cls: str) -> Any:
    """An optimizer of timm: "Lamb" is the class timm.optim.Lamb. ModuleNotFoundError without timm."""
    load()
    return getattr(importlib.import_module("timm.optim"), cls)
