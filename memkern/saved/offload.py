"""Stored tensors that leave the device: the options, and the links of all devices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .copies import FakeCopies, copies_of
from .link import BLOCKS, Away, Link, Offload


def options_of(offload: Any, ahead: Any, blocks: int = BLOCKS) -> Offload | None:
    """The options as the arguments ``offload`` and ``offload_ahead`` give them; None without offload.

    Raises:
        ValueError: offload is no bool, offload_ahead neither None nor a number of bytes, or given without offload.
    """
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be True or False, got {offload!r}")
    if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
        raise ValueError(f"offload_ahead must be None or a number of bytes, 0 or more, got {ahead!r}")
    if ahead is not None and not offload:
        raise ValueError(f"offload_ahead is for offload=True, got offload_ahead={ahead!r} without it")
    return Offload(ahead, blocks) if offload else None


def is_parameter(x: Tensor) -> bool:
    """Whether it is a parameter or a view of one, such as a frozen layer's weight, which the model holds."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


# ---- the links of all devices

_links: dict[torch.device, Link] = {}
_fake_links: weakref.WeakKeyDictionary[Any, dict[torch.device, Link]] = weakref.WeakKeyDictionary()


def link_of(x: Tensor) -> Link:
    """The link of a tensor's device."""
    device = x.device
    if isinstance(x, FakeTensor):
        links = _fake_links.setdefault(x.fake_mode, {})
        if device not in links:
            links[device] = Link(device, FakeCopies(), x.fake_mode)
        return links[device]
    if (link := _links.get(device)) is None:
        link = _links[device] = Link(device, copies_of(device))
    return link


def put(data: Sequence[Tensor], options: Offload) -> Sequence[Tensor] | Away:
    """See :meth:`Link.put`."""
    return link_of(data[0]).put(data, options)


def fake_bytes_on_host(mode: Any) -> int:
    """Most bytes of a mode's fake tensors that were on the host."""
    return sum(link.pool.most for link in _fake_links.get(mode, {}).values())


class HostBytes(NamedTuple):
    """Host memory of the stored tensors of all devices: all of it, and what is used now."""

    total: int
    used: int


def host_bytes() -> HostBytes:
    for link in _links.values():
        with link.lock:
            link.note_dead()
    return HostBytes(sum(link.pool.total for link in _links.values()), sum(link.pool.used for link in _links.values()))


def empty_pools() -> int:
    """Frees host memory that is not used; returns the bytes."""
    return sum(link.empty() for link in _links.values())
