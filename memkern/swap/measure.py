"""Measures what a model saves while its graph is alive: in total and by module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..memory import live_bytes_after

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes that one forward pass leaves alive for its backward pass.

    total: all storages that the pass allocated and that are alive after it, its result included. modules: of each
    module that saves something itself, what it was the first to save.
    """

    total: int
    modules: dict[str, int]


def call_of(model: nn.Module, example: Any) -> tuple[Call, list[Tensor]]:
    """The forward pass on an example, and the example's tensors. Example: a tensor, a tuple, or a dict of keywords."""
    keywords = dict(example) if isinstance(example, Mapping) else {}
    arguments = () if isinstance(example, Mapping) else example if isinstance(example, tuple) else (example,)
    held = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    return lambda: model(*arguments, **keywords), held


@contextlib.contextmanager
def same_state(model: nn.Module) -> Iterator[None]:
    """Restores buffers and random numbers afterwards."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for table, before in tables:  # a forward pass may assign, and add, buffers
                table.clear()
                table.update(before)
            for buffer, copy in buffers:
                buffer.copy_(copy)


class _ByModule:
    """Hooks that give each saved storage to the module whose forward pass was the first to save it."""

    def __init__(self, model: nn.Module, held: list[Tensor]) -> None:
        self.stack = [""]
        self.saved: list[tuple[str, Tensor]] = []
        parameters = [*model.parameters(), *model.buffers(), *held]
        self.known = {tensor.untyped_storage()._cdata for tensor in parameters}

    def enter(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.stack.append(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.append((self.stack[-1], tensor))  # held: no address is used a second time
        return tensor

    def bytes(self) -> dict[str, int]:
        counted: dict[str, int] = defaultdict(int)
        known = set(self.known)
        for name, tensor in self.saved:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                counted[name] += storage.nbytes()
        return dict(counted)


def _by_module(model: nn.Module, call: Call, held: list[Tensor]) -> dict[str, int]:
    record = _ByModule(model, held)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(record.enter(name), prepend=True))
        handles.append(module.register_forward_hook(record.leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(record.pack, lambda tensor: tensor):
            result = call()
        del result
    finally:
        for handle in handles:
            handle.remove()
    return record.bytes()


def total(model: nn.Module, example: Any) -> int:
    """Bytes alive after a forward pass on the example, with its graph; parameters and the example do not count."""
    call, held = call_of(model, example)
    with same_state(model), torch.enable_grad():
        return live_bytes_after(call, model, *held)


def measure(model: nn.Module, example: Any) -> Measured:
    """Runs the model forward twice on the example, and restores buffers and random numbers."""
    call, held = call_of(model, example)
    with same_state(model), torch.enable_grad():
        modules = _by_module(model, call, held)
    return Measured(total(model, example), modules)
