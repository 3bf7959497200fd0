"""Places in the autograd graph."""

from __future__ import annotations

from typing import Any

import torch


class Edge:
    """A value's place in the autograd graph: output ``nr`` of ``node``."""

    __slots__ = ("_metadata", "device", "dtype", "node", "nr", "shape")
    _metadata: Any
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    def __init__(self, node: Any, nr: int) -> None:
        self.node, self.nr = node, nr

    def __getattr__(self, name: str) -> Any:
        """dtype, device and shape at the first look; torch makes a new list of them at every look."""
        if name == "shape":
            self.shape = torch.Size(self._metadata.shape)
        elif name in self.__slots__:
            self._metadata = about = self.node._input_metadata[self.nr]
            self.dtype, self.device = about.dtype, about.device
        else:
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def inputs(self) -> list[Edge | None]:
        return [None if node is None else Edge(node, nr) for node, nr in self.node.next_functions]
