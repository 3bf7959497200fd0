"""CUDA graphs without CUDA: captured operations are recorded, and run again into the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memkern import cuda_graphs


class Place(NamedTuple):
    """A tensor without its memory, which must be seen to be freed: what is still alive is not stored in codes."""

    storage: StorageWeakRef
    nbytes: int
    dtype: torch.dtype
    layout: tuple[Any, Any, int]  # shape, strides, offset


def place(x: Tensor) -> Place:
    storage = x.untyped_storage()
    return Place(StorageWeakRef(storage), storage.nbytes(), x.dtype, (x.shape, x.stride(), x.storage_offset()))


class Graph(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph, and of the capture.

    pool: what takes the place of memory that has been freed since, of all graphs. No memory is used twice, so a value
    that is read after CUDA's allocator would have given its memory to another is not found.
    """

    def __init__(self, pool: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.set_.source_Storage_storage_offset:  # a tensor made of a place, nothing computed
            self.calls.append((func, *tree_map_only(Tensor, place, (args, kwargs or {}, result))))
        return result

    def tensor(self, at: Place) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(at.storage.cdata)
        if storage is None:
            storage = self.pool.setdefault(at.storage.cdata, torch.UntypedStorage(at.nbytes))
        shape, strides, offset = at.layout
        return torch.empty(0, dtype=at.dtype).set_(storage, offset, shape, strides)

    def replay(self) -> None:
        with torch.no_grad():
            for func, *values in self.calls:
                args, kwargs, result = tree_map_only(Place, self.tensor, values, is_leaf=lambda x: isinstance(x, Place))
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def recorded() -> Iterator[list[Graph]]:
    """Modules on the CPU are graphed as if they were on a GPU. Gives the graphs as they are made."""
    graphs: list[Graph] = []
    pool: dict[int, torch.UntypedStorage] = {}

    class Recorded(Graph):  # a class, as other libraries' annotations want it
        def __init__(self) -> None:
            super().__init__(pool)
            graphs.append(self)

    with contextlib.ExitStack() as stack:
        for module, name, stand_in in (
            (cuda_graphs, "DEVICE", "cpu"),
            (torch.cuda, "CUDAGraph", Recorded),
            (torch.cuda, "graph", lambda graph, **_: graph),
            (torch.cuda.graphs, "graph_pool_handle", lambda: (0, 1)),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "Stream", object),
            (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        ):
            stack.enter_context(patch.object(module, name, stand_in))
        yield graphs
