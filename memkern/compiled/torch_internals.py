"""torch's private names that the partitioner needs, in one place: no version promises to keep them.

``Partitioner`` is a subclass of torch's ``CustomPartitionerFn``, which Inductor calls with the joint graph of the
forward and the backward pass.
"""

# ruff: noqa: F401 - the other files of the package import them from here

from __future__ import annotations

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
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

if not hasattr(inductor_config, "custom_partitioner_fn"):
    raise ImportError("torch._inductor.config has no custom_partitioner_fn")

HINT = next(name for name in ("optimization_hint", "hint_int", "size_hint") if hasattr(partitioners, name))
"""The name of the function of torch's partitioners that makes a number of a symbolic size; the last in torch 2.11."""
