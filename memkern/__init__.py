"""memkern: 8-bit optimizers, few-bit activations and a memory planner for training with PyTorch.

``import memkern`` imports nothing heavy; names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import backend, functional, memory, nn, optim, planner, train
    from .backend import report, use_backend
    from .blocks.checkpointing import checkpoint_blocks
    from .compiled.compiling import compile
    from .integrations.transformers import trainer_arguments
    from .planner.planning import plan
    from .quant.affine import dequantize_affine, quantize_affine
    from .quant.blockwise import dequantize_blockwise, quantize_blockwise
    from .swap.compress import compress, restore
    from .techniques.applying import apply, make_optimizer
    from .techniques.options import OptionError, Techniques

__all__ = [
    "OptionError",
    "Techniques",
    "__version__",
    "apply",
    "backend",
    "checkpoint_blocks",
    "compile",
    "compress",
    "dequantize_affine",
    "dequantize_blockwise",
    "functional",
    "make_optimizer",
    "memory",
    "nn",
    "optim",
    "plan",
    "planner",
    "quantize_affine",
    "quantize_blockwise",
    "report",
    "restore",
    "train",
    "trainer_arguments",
    "use_backend",
]

_LAZY = {
    "OptionError": "techniques.options",
    "Techniques": "techniques.options",
    "apply": "techniques.applying",
    "checkpoint_blocks": "blocks.checkpointing",
    "compile": "compiled.compiling",
    "compress": "swap.compress",
    "dequantize_affine": "quant.affine",
    "dequantize_blockwise": "quant.blockwise",
    "make_optimizer": "techniques.applying",
    "plan": "planner.planning",
    "quantize_affine": "quant.affine",
    "quantize_blockwise": "quant.blockwise",
    "report": "backend",
    "restore": "swap.compress",
    "trainer_arguments": "integrations.transformers",
    "use_backend": "backend",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
