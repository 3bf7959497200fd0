"""Counts tensor bytes: an optimizer's state, what a forward pass saves for backward, the peak of one call."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The types of the arguments ``held``: what exists before the measured call.
Held = Tensor | nn.Module | torch.optim.Optimizer
_PLAIN = {Tensor, nn.Parameter, FakeTensor}
"""Types without tensors inside, for which looking up an attribute that they lack takes long."""
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods that return the tensors inside of a sparse one, which has no storage itself."""


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors, those inside of wrapper subclasses too; what is no tensor is skipped."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
            # A wrapper subclass (torchao's states, DTensor): the memory is that of the tensors inside.
            yield from _storages(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif tensor.layout in _SPARSE:
            yield from _storages(getattr(tensor, name)() for name in _SPARSE[tensor.layout])
        else:
            yield tensor.untyped_storage()


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, or of what it returns."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from _tensors(item)


def _is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, such as a frozen layer's weight, which the model holds."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' storages, each storage counted once and whole; what is no tensor is skipped."""
    return sum({storage._cdata: storage.nbytes() for storage in _storages(tensors)}.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in ``optimizer.state``: moments, codes, scales and step counters."""
    return tensor_bytes(tree_leaves(list(optimizer.state.values())))


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the tensors in ``optimizer.state`` by entry: ``exp_avg``, ``exp_avg_scale``, ``weight_error``, ..."""
    by_key: dict[str, list[Any]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            by_key.setdefault(key, []).append(value)
    return {key: tensor_bytes(tree_leaves(values)) for key, values in by_key.items()}


def _held_tensors(held: Iterable[Held]) -> Iterator[Any]:
    """The tensors of what ``held`` names: parameters, buffers, gradients, states."""
    for item in held:
        if isinstance(item, nn.Module):
            yield from (*item.parameters(), *item.buffers())
            yield from (parameter.grad for parameter in item.parameters())
        elif isinstance(item, torch.optim.Optimizer):
            yield from tree_leaves(list(item.state.values()))
        else:
            yield item


@dataclasses.dataclass(eq=False)
class Storage:
    """A storage's bytes. It is alive from clock ``born`` of :class:`LiveBytes` on, and no longer at clock ``died``."""

    size: int
    born: int
    died: int | None = None


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators return until they are freed, which a weak reference's callback notices.

    held: tensors that exist already. counted: whether their bytes count.
    device: the type of device whose tensors count; None, every one.
    on_operator: called as ``on_operator(func, args, kwargs, out)`` after each operator that allocates.

    live, peak: bytes now, and the most so far. clock: how many operators have allocated so far. storages: all that
    count, in the order of their allocation. Tensors on the meta device have no bytes.
    """

    def __init__(
        self,
        held: Iterable[Any] = (),
        *,
        counted: bool = True,
        device: str | None = None,
        on_operator: Callable[..., None] = lambda func, args, kwargs, out: None,
    ) -> None:
        super().__init__()
        self.live = self.peak = self.clock = 0
        self.storages: list[Storage] = []
        self._known: dict[int, tuple[weakref.ref, Storage | None]] = {}
        self._on_operator, self._device = on_operator, device
        self._track(held, counted)

    def _track(self, tensors: Iterable[Any], counted: bool) -> None:
        """Remembers storages that are new; where not ``counted``, without an entry in ``storages``."""
        for x in tensors:
            for storage in _storages((x,)):
                kind = x.device.type
                if storage._cdata not in self._known and kind != "meta" and self._device in (None, kind):
                    self._add(storage, counted)
        self.peak = max(self.peak, self.live)

    def _add(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        entry = Storage(storage.nbytes(), self.clock) if counted else None

        def freed(_: weakref.ref) -> None:
            del self._known[key]
            if entry is not None:
                self.live -= entry.size
                entry.died = self.clock + 1  # still alive at the clock itself

        self._known[key] = weakref.ref(storage, freed), entry
        if entry is not None:
            self.storages.append(entry)
            self.live += entry.size

    def storage_of(self, tensor: Tensor) -> Storage | None:
        """The tensor's storage; None where it is not counted."""
        return self._known.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls for fake tensors
            return func(*args)
        return self.around(func, args, kwargs or {}, lambda func, args, kwargs: func(*args, **kwargs))

    def around(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Returns ``run(func, args, kwargs)``, and follows the storages of what it returns."""
        # An input that is not known yet was allocated before the call. It does not count, and an output that is a view
        # of it is no new storage.
        self._track(_tensors((args, kwargs)), counted=False)
        out = run(func, args, kwargs)
        count_before = len(self.storages)
        self.clock += 1  # the clock at which what the operator allocates is alive first
        self._track(_tensors(out), counted=True)
        if len(self.storages) == count_before:  # the operator has allocated nothing, and does not count
            self.clock -= 1
        else:
            self._on_operator(func, args, kwargs, out)
        return out


def peak_bytes(fn: Callable[[], Any], *held: Held) -> int:
    """Runs ``fn()`` once and returns the peak of tensor bytes during the call.

    held: the modules (parameters, buffers, gradients), optimizers (states) and tensors that exist before the
    call. Their bytes count, and what the call allocates; other tensors do not.

    CUDA (any of ``held`` there): the caching allocator's statistics. CPU, and fake tensors of any device: the
    storages that operators take or return, so scratch memory inside one operator is not seen. That is slower than the
    plain call, and gives the same bits. What torch.compile has compiled runs uncompiled in it, and in later calls too:
    torch does that under a dispatch mode.
    """
    tensors = [tensor for tensor in _held_tensors(held) if isinstance(tensor, Tensor)]
    device = next((t.device for t in tensors if t.is_cuda and not isinstance(t, FakeTensor)), None)
    if device is not None:
        held_bytes = tensor_bytes(tensors)
        del tensors  # so that a gradient that ``fn`` drops is freed
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        return held_bytes + torch.cuda.max_memory_allocated(device) - before
    live = LiveBytes(tensors)
    del tensors
    with live:
        fn()
    return live.peak


def live_bytes_after(fn: Callable[[], Any], *held: Held) -> int:
    """Runs ``fn()`` once and returns the bytes that it allocated and that its result keeps alive, graph included.

    held: as for :func:`peak_bytes`; they do not count. Counts all that a forward pass leaves for its backward pass,
    also what an autograd.Function stores outside of ``save_for_backward``, and codes in place of tensors. CPU, and
    fake tensors of any device: the storages that operators return. CUDA: by the caching allocator's figures.
    """
    tensors = [tensor for tensor in _held_tensors(held) if isinstance(tensor, Tensor)]
    device = next((t.device for t in tensors if t.is_cuda and not isinstance(t, FakeTensor)), None)
    if device is not None:
        before = torch.cuda.memory_allocated(device)
        result = fn()
        gc.collect()
        return torch.cuda.memory_allocated(device) - before
    live = LiveBytes(tensors)
    before = live.live
    with live:
        result = fn()
    gc.collect()  # models' outputs may be in reference cycles with what they no longer need
    after = live.live
    del result
    return after - before


def saved_bytes(fn: Callable[[], Any], *held: Held) -> int:
    """Runs ``fn()`` once, a forward pass, and returns the bytes that autograd saves for its backward pass.

    Each storage counts once and whole, however many operators save it. Parameters do not count, nor does what
    ``held`` names: modules (their buffers too), optimizers and tensors that exist anyway, such as the input. A
    copy of a parameter in another dtype, which autocast makes, does count.

    Counted by saved-tensor hooks: what an autograd.Function stores outside of ``save_for_backward`` is not seen, and
    of a checkpointed block only its inputs. The result has the same bits as without counting.
    """
    saved: list[Tensor] = []  # keeps the storages alive, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    excluded = [*_held_tensors(held), *filter(_is_parameter, saved)]
    excluded_ids = {storage._cdata for storage in _storages(excluded)}
    sizes = {s._cdata: s.nbytes() for s in _storages(saved) if s._cdata not in excluded_ids}
    saved.clear()  # a graph that lives on holds the hooks, and the hooks hold this list
    del result  # last: it keeps the graph and its saved tensors alive
    return sum(sizes.values())


def return_freed_memory() -> None:
    """Makes glibc return to the system what is free now, and from now on each block of 64 KiB or more when it is freed.

    Predictions of :func:`memkern.plan` assume this. By default glibc raises the threshold up to 32 MiB as large blocks
    are freed, and keeps freed blocks below it: most activations of a training step. No effect on other systems.
    """
    gc.collect()
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(-3, 65536)  # M_MMAP_THRESHOLD of malloc.h
        library.malloc_trim(0)
