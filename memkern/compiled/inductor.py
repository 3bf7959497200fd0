"""Makes the options of torch's Inductor, with memkern's partitioner among them."""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

FIRST_VERSION = "2.11"
"""The first tested version of torch: no version promises what nodes of joint graphs carry."""


def options_of_inductor(
    given: dict[str, Any],
    mode: str | None,
    saved_bits: int | str,
    memory_budget: float | int | None,
    activations: int | None,
    codec_backend: str | None,
) -> dict[str, Any]:
    """Inductor's options of a mode, those ``given``, and the partitioner. Raises RuntimeError without one."""
    if TorchVersion(torch.__version__) < FIRST_VERSION:
        raise RuntimeError(f"memkern.compile needs torch {FIRST_VERSION} or later, got {torch.__version__}")
    try:
        from . import torch_internals
        from .partitioner import Partitioner
    except ImportError as error:
        raise RuntimeError(
            f"memkern.compile has not been tried with torch {torch.__version__}, which lacks what it needs: {error}"
        ) from error
    mode_options = {} if mode is None else torch_internals.list_mode_options(mode)  # torch takes a mode or options
    return {
        **mode_options,
        **given,
        "custom_partitioner_fn": Partitioner(saved_bits, memory_budget, activations, codec_backend),
    }
