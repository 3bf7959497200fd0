"""FakeMode: a FakeTensorMode with a faster cache, which makes operators' results by the metadata of their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Around = Callable[[Any, Any, Any, Callable[..., Any]], Any]
"""Called as ``around(func, args, kwargs, run)`` for each operator; ``run(func, args, kwargs)`` returns its result."""
MAX_ENTRIES = 100_000  # of the cache, which is emptied then
DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
PLAIN = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of arguments that a key of the cache contains as they are. Of tensors it contains the metadata."""
_device = torch.ops.prim.device.default
_meta = torch.device("meta")
_makers: dict[Any, Callable[..., Any] | None] = {}  # the cache: by call, what makes its result; None: nothing can
_NOT_SEEN = object()  # in place of a maker for a call that is not in the cache
_is_cacheable: dict[Any, bool] = {}  # by operator


class _NotCached(Exception):
    """The call cannot be in the cache: its result may depend on more than the metadata of its arguments."""


class FakeMode(FakeTensorMode):
    """FakeTensorMode in a quarter of the time, for operators that any mode of the process has seen before.

    FakeTensorMode has a cache too, but needs 90 us for an operator that is in it.

    around: called for each operator that autograd or a model calls. A TorchDispatchMode on top of this one could do the
    same, but would also be called each time that a tensor's device is asked for.
    """

    shortens_loops = True
    """Read by :func:`memkern.functions.loops.few_iterations`, which then leaves out iterations of equal memory."""

    @property
    def avoid_device_init(self) -> bool:
        """Whether ``torch.tensor([0, 1], device="cuda")`` makes a CPU tensor and then a fake copy on the device. In
        FakeTensorMode it does where there is no GPU, and with fake CUDA torch says that there is one."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps ``__torch_dispatch__`` so that dynamo skips it: no, as the wrapper doubles its time."""
        return False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.around: Around | None = None

    @contextlib.contextmanager
    def inside(self, outer: Around) -> Iterator[None]:
        """A ``with`` block in which ``outer`` is called around operators, with the former ``around`` inside."""
        inner = self.around
        if inner is None:
            self.around = outer
        else:
            self.around = lambda func, args, kwargs, run: outer(
                func, args, kwargs, lambda func, args, kwargs: inner(func, args, kwargs, run)
            )
        try:
            yield
        finally:
            self.around = inner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        around, self.around = self.around, None
        if around is None:  # one of the operators of which another consists
            return self.run(func, args, kwargs or {})
        try:
            return around(func, args, kwargs or {}, self.run)
        finally:
            self.around = around

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns. To be called with this mode disabled, as it is in ``__torch_dispatch__``."""
        cacheable = _is_cacheable.get(func)
        if cacheable is None:
            cacheable = _is_cacheable[func] = _follows_from_metadata(func)
        if not cacheable:
            return self.dispatch(func, (), args, kwargs)
        try:
            key = (func, self._key(args), self._key(tuple(kwargs.items())) if kwargs else (), torch.get_default_dtype())
        except _NotCached:
            return self.dispatch(func, (), args, kwargs)
        make: Any = _makers.get(key, _NOT_SEEN)
        if make is None:  # no function can make this call's result
            return self.dispatch(func, (), args, kwargs)
        if make is _NOT_SEEN:
            out = self.dispatch(func, (), args, kwargs)
            if len(_makers) >= MAX_ENTRIES:
                _makers.clear()
            make = _makers[key] = _maker(out, args)
            if make is None:
                return out
            # The result is made again: dispatch() keeps references to its own, and torch.utils.swap_tensors, which
            # module.to() calls, refuses a tensor that others refer to.
        return make(self, args)

    def _key(self, args: Any) -> tuple[Any, ...]:
        """The metadata of arguments. Raises _NotCached where the result may depend on more."""
        key: list[Any] = []
        for x in args:
            if isinstance(x, FakeTensor):
                if x.constant is not None or x.fake_mode is not self:
                    raise _NotCached
                key.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, x.requires_grad))
            elif isinstance(x, (list, tuple)):
                key.append(self._key(x))
            elif type(x) in PLAIN:
                key.append((type(x), x))  # 1 and True are equal
            else:
                raise _NotCached
        return tuple(key)


def _follows_from_metadata(func: Any) -> bool:
    """Whether the metadata of what the operator returns follows from that of its arguments, which keep theirs."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and not DYNAMIC & {*func.tags}
        and func.namespace != "prim"
        and (not func._schema.is_mutable or _writes_its_first(func))
    )


def _writes_its_first(func: Any) -> bool:
    """Whether an operator writes the elements of its first argument, and returns that: ``add_``, ``copy_``."""
    first, *others = func._schema.arguments
    written = first.alias_info is not None and first.alias_info.is_write
    return written and func._schema.name.endswith("_") and not any(x.alias_info for x in others)


def _maker(out: Any, args: Any) -> Callable[[FakeMode, Any], Any] | None:
    """A function of the mode and the arguments that makes a result such as ``out``; None where none can."""
    if args and out is args[0]:
        return lambda mode, args: args[0]
    if isinstance(out, (tuple, list)):
        makers = [_maker_of_one(x, args) for x in out]
        storages = [x.untyped_storage()._cdata for x in out if isinstance(x, Tensor)]
        of_arguments = _storages(args)
        new = [s for s in storages if s not in of_arguments]
        # Each maker allocates a storage of its own, so that none can make results that share a new one.
        results_share_a_new_storage = len(set(new)) < len(new)
        if results_share_a_new_storage or any(m is None for m in makers):
            return None
        kind = list if isinstance(out, list) else tuple
        return lambda mode, args: kind([make(mode, args) for make in makers if make is not None])
    return _maker_of_one(out, args)


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor on the meta device: in 2 us, where the call of torch.ops.aten.empty_strided takes 15."""
    with _DisableTorchFunction():
        return torch.empty_strided(shape, stride, dtype=dtype, device=_meta)


def _storages(args: Any) -> dict[int, int]:
    """By the storage of each tensor argument, the argument's index; -1 for tensors in lists."""
    indices: dict[int, int] = {}
    for i, x in enumerate(args):
        if isinstance(x, Tensor):
            indices.setdefault(x.untyped_storage()._cdata, i)
        elif isinstance(x, (list, tuple)):
            indices.update(dict.fromkeys(_storages(x), -1))
    return indices


def _maker_of_one(x: Any, args: Any) -> Callable[[FakeMode, Any], Any] | None:
    """As :func:`_maker`, for an operator with one result."""
    if type(x) in PLAIN:
        return lambda mode, args: x
    if not isinstance(x, FakeTensor) or x.constant is not None or any(x is y for y in args):
        return None
    if x.layout != torch.strided or x.is_conj() or x.is_neg() or x.requires_grad:
        return None
    shape, stride, offset, dtype = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype
    device = x.fake_device
    attributes = {name: value for name, value in vars(x).items() if name != "fake_mode"}
    source = _storages(args).get(x.untyped_storage()._cdata)

    def wrapped(mode: FakeMode, elem: Tensor) -> Tensor:
        """A FakeTensor around a tensor on the meta device."""
        fake = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        fake.fake_mode = mode
        return fake

    if source is None:  # a new storage
        # The maker's storage ends with the last element. A result in a larger one has to come from torch.
        if _empty(shape, stride, dtype).untyped_storage().nbytes() != x.untyped_storage().nbytes():
            return None
        return lambda mode, args: wrapped(mode, _empty(shape, stride, dtype))
    if source < 0:  # a view of a tensor in a list of tensors, which ``args[source]`` could not name
        return None

    def view(mode: FakeMode, args: Any) -> Tensor:
        with _DisableTorchFunction():
            elem = torch.empty_strided((0,), (1,), dtype=dtype, device=_meta)
            elem.set_(args[source].untyped_storage(), offset, shape, stride)
        return wrapped(mode, elem)

    return view
