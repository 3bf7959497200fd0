"""The memory under a saved tensor, which others may free, exchange or fill again before the backward pass.

FSDP empties a weight's storage after each forward pass and fills it again before the layer's own backward pass;
offloading exchanges ``.data``. The layer's own operations read the weight while it is there. Another layer's may not.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..quant.layout import extent

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} of shape "
    "{shape} is at version {now}, it was saved at version {then}"
)
FREED = (
    "a tensor of shape {shape} that is needed for gradient computation has lost its memory: its storage of {now} bytes "
    "was resized after the forward pass, as sharding and offloading of weights do, and not filled again for the "
    "backward pass"
)
REPLACED = (
    "a parameter or another leaf that is needed for gradient computation was saved as {then}, and its .data is now "
    "{now}: it was replaced between the forward and the backward pass"
)


def version_of(x: Tensor) -> Tensor:
    """A tensor without memory that has ``x``'s version counter: it tells of in-place changes and holds nothing."""
    counter = x.detach()
    counter.data = counter.new_empty(0)
    return counter


def check_version(what: str, counter: Tensor, version: int, shape: Sequence[int]) -> None:
    """Raises RuntimeError if a saved tensor has been changed in place."""
    if counter._version != version:
        raise RuntimeError(CHANGED.format(what=what, shape=tuple(shape), now=counter._version, then=version))


_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def is_plain(x: Tensor) -> bool:
    """Neither sparse nor of a subclass, such as nested tensors and DTensor."""
    return type(x) in _PLAIN and x.layout == torch.strided


def bytes_needed(shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> int:
    """Bytes from the start of a storage to the end of a tensor's last element."""
    return 0 if 0 in shape else (offset + extent(shape, stride)) * dtype.itemsize


def is_present(x: Tensor) -> bool:
    """Whether a tensor has memory: of one that FSDP has freed the storage is empty. Makes no storage object."""
    if not is_plain(x) or isinstance(x, FakeTensor) or x.is_meta or x.nbytes == 0:
        return True
    return x.data_ptr() != x.storage_offset() * x.itemsize


def check_present(x: Tensor) -> None:
    """Raises RuntimeError if a tensor's storage is too small for its elements, as after ``resize_(0)``."""
    if not is_plain(x):
        return
    offset, size = int(x.storage_offset()), x.untyped_storage().size()
    if size < x.nbytes + offset * x.itemsize and size < bytes_needed(x.shape, x.stride(), offset, x.dtype):
        raise RuntimeError(FREED.format(shape=tuple(x.shape), now=size))


Place = tuple[tuple[int, ...], torch.dtype, torch.device]


def place_of(x: Tensor) -> Place:
    return tuple(x.shape), x.dtype, x.device


def check_place(x: Tensor, place: Place) -> None:
    """Raises RuntimeError if a leaf has other data than what was saved: of another shape, dtype or device."""
    if place_of(x) != place:
        then, now = (f"{shape} in {dtype} on {device}" for shape, dtype, device in (place, place_of(x)))
        raise RuntimeError(REPLACED.format(then=then, now=now))


# ---- parameters that others manage

_of_fsdp2: dict[int, tuple[weakref.ref, bool]] = {}  # by id of the parameter, in processes that use FSDP2


def is_managed(x: Tensor) -> bool:
    """Whether x is a parameter, or a view of one, whose memory FSDP or DeepSpeed's ZeRO-3 frees and fills again.

    Nothing but its views and casts is derived from it: when a later layer's backward pass asks, it may be empty.
    """
    p = x if x._base is None else x._base
    if not isinstance(p, nn.Parameter):
        return False
    # The marks of FSDP1's flat and original parameters, and of ZeRO-3's.
    return "_fsdp_flattened" in p.__dict__ or "ds_id" in p.__dict__ or _is_of_fsdp2(p)


def _is_of_fsdp2(p: Tensor) -> bool:
    """Whether p is an unsharded parameter of ``fully_shard``, which carries no mark."""
    composable = sys.modules.get("torch.distributed._composable_state")
    if composable is None or not composable._module_state_mapping:
        return False
    known = _of_fsdp2.get(id(p))
    if known is None or known[0]() is not p:
        for unsharded in _unsharded_parameters(list(composable._module_state_mapping.values())):
            _remember(unsharded, True)
        known = _of_fsdp2.get(id(p))
        if known is None or known[0]() is not p:
            known = _remember(p, False)
    return known[1]


def _remember(p: Tensor, managed: bool) -> tuple[weakref.ref, bool]:
    key = id(p)
    _of_fsdp2[key] = known = weakref.ref(p, lambda _: _of_fsdp2.pop(key, None)), managed
    return known


def _unsharded_parameters(states: list[weakref.ref]) -> Iterator[Tensor]:
    for state in (ref() for ref in states):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.13
            groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) else []
        for group in groups:
            for param in group.fsdp_params:
                if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                    yield unsharded
