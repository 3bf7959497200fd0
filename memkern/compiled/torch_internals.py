"""The names of torch that no version promises to keep, all of them in one place.

``Partitioner`` is a subclass of torch's ``CustomPartitionerFn``, which Inductor calls with the joint graph of the
forward and the backward pass.
"""

from __future__ import annotations

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch import _TorchCompileInductorWrapper as TorchCompileInductorWrapper
from torch._functorch.partitioners import MinCutOptions, must_recompute
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import extract_tensor_metadata
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

FIRST_VERSION = "2.11"
"""Where this has been tested: what nodes of joint graphs carry is not promised either."""


def check() -> None:
    """Raises RuntimeError for another torch."""
    is_old = TorchVersion(torch.__version__) < FIRST_VERSION
    if is_old or not hasattr(inductor_config, "custom_partitioner_fn"):
        raise RuntimeError(f"memkern.compile needs torch {FIRST_VERSION} or later, got {torch.__version__}")


__all__ = [
    "CustomPartitionerFn",
    "MinCutOptions",
    "TorchCompileInductorWrapper",
    "check",
    "detect_fake_mode",
    "extract_tensor_metadata",
    "functorch_config",
    "get_hash_for_files",
    "inductor_config",
    "is_contiguous_or_false",
    "list_mode_options",
    "make_fx",
    "must_recompute",
    "partitioners",
    "select_decomp_table",
]
