"""Gives fake tensors the values that models ask for: computed from integers, masks and constants, else assumed."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .fake_mode import FakeMode

LARGEST = 2**20
"""Elements of the largest tensor whose values are computed."""

# Kinds of operators
aten = torch.ops.aten
UNINITIALIZED = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default,
    aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default, aten.resize_.default,
}  # fmt: skip
"""Operators whose results have no values yet."""

READ_A_SHAPE = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
}  # fmt: skip
"""Operators that read an argument's shape, not its values."""

INDEXING = {aten.index.Tensor, aten.index_put_.default}
"""Operators whose second argument is a list of indices, which may be masks."""

DIMENSION_OF = {aten.argmax.default: 1, aten.max.dim: 1, aten.sort.default: 1, aten.topk.default: 2}
"""Operators that return indices along a dimension, and the place of ``dim``. All but argmax return values first."""
ASSUMED = {
    aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims,
    aten.isnan.default, aten.isinf.default, *DIMENSION_OF,
}  # fmt: skip
"""Operators whose results are assumed (:func:`_assumed`) where their arguments have no values."""


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The shapes that aten._ctc_loss returns where all transcripts are equally long: losses, and alpha for backward."""
    frames, size = log_probs.shape[:2]
    states = 2 * (targets.numel() // size) + 1
    return log_probs.new_zeros(size), log_probs.new_zeros(size, frames, states)


CTC_LOSS: dict[Any, Any] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: lambda _, log_probs, *rest: torch.zeros_like(log_probs),
}
"""Operators that read the lengths of sequences, which fake tensors do not have, and functions in their place."""


class _Unknown(Exception):
    """An argument has no values."""


class Values:
    """The values of fake tensors that follow from integers, masks and constants: token ids, positions, sizes.

    Weights have none, and what is computed from them has none. Where a model asks for such values, this is assumed: no
    element is NaN or infinite, "any" is false and "all" is true; a router sends tokens to all experts in turn; a
    selection selects all elements, which needs the most memory.

    mode: the FakeMode of the tensors, whose ``around`` is to be set to :meth:`around`.
    """

    def __init__(self, mode: FakeMode) -> None:
        self._mode = mode
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by a fake tensor's id: it, and its values

    def _values(self, x: Tensor) -> Tensor:
        """A tensor's values, on the CPU. Raises _Unknown. Call with dispatch modes disabled: it copies real tensors."""
        if isinstance(x, FakeTensor):
            reference, values = self._known.get(id(x), (None, None))
            if reference is not None and values is not None and reference() is x:
                return values
        elif type(x) is Tensor and x.device.type == "cpu" and x.numel() <= LARGEST:
            return x.clone()
        raise _Unknown

    def forget(self, x: Tensor) -> None:
        """Takes the values from a tensor and from its views."""
        storage = _storage(x)
        self._known = {key: entry for key, entry in self._known.items() if _storage(entry[0]()) != storage}
        if isinstance(x, FakeTensor) and x.constant is not None:  # torch's own values, of tensors of one element
            self._mode.fake_tensor_converter.invalidate_constant_aliases(x.constant)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Takes the values from the tensors that an operator has written, where the new values are not known."""
        for x in _mutated(func, args, kwargs):
            self.forget(x)

    def _remember(self, out: Any, values: Any) -> None:
        """Gives the tensors of an operator's result their values."""
        for x, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(x, FakeTensor) and isinstance(value, Tensor):
                self._known[id(x)] = weakref.ref(x, functools.partial(self._forget_freed, id(x))), value

    def _forget_freed(self, key: int, reference: weakref.ref[Tensor]) -> None:
        """Forgets the values of a tensor that is freed, unless a new one has got its id."""
        if key in self._known and self._known[key][0] is reference:
            del self._known[key]

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result for its arguments' values. Raises _Unknown where one has none."""
        if func in UNINITIALIZED or torch.Tag.nondeterministic_seeded in func.tags:
            raise _Unknown
        if func not in READ_A_SHAPE and self._lacks_values(args):
            raise _Unknown
        if not all(isinstance(x, FakeTensor) for x in _mutated(func, args, kwargs)):
            raise _Unknown  # it would change a real tensor: a constant of the model

        def on_cpu(x: Any) -> Any:
            if isinstance(x, Tensor):
                return torch.empty((), dtype=x.dtype).expand(x.shape) if func in READ_A_SHAPE else self._values(x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map(on_cpu, (args, kwargs))
            try:
                return func(*args, **kwargs)
            except Exception as error:  # where the call is wrong, it will raise on the fake tensors, too
                raise _Unknown from error

    def _lacks_values(self, args: Any) -> bool:
        """Whether a fake tensor among the arguments has no values."""
        for x in args:
            if isinstance(x, FakeTensor):
                if id(x) not in self._known:
                    return True
            elif isinstance(x, (list, tuple)) and self._lacks_values(x):
                return True
        return False

    def around(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Returns ``run(func, args, kwargs)``, or what it would return if fake tensors had the values known here."""
        if _is_ordinary(func) and self._lacks_values(args):
            out = run(func, args, kwargs)
            self._forget_written(func, args, kwargs)
            return out
        with self._mode:
            return self._with_values(func, args, kwargs)

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result, with values where they can be computed or assumed."""
        if func in CTC_LOSS:
            return CTC_LOSS[func](*args)
        if _depends_on_values(func, args):
            try:
                values = self._compute(func, args, kwargs)
            except _Unknown:
                self._forget_written(func, args, kwargs)
                if func is aten.index.Tensor:  # the masks may have values though the tensor has none
                    return func(args[0], self._without_masks(args[1]))
                return _needing_the_most(func, args, kwargs)
            if func is aten.index_put_.default:  # _compute has written into the values that are stored for args[0]
                return args[0]
            return tree_map(lambda x: self._fake_of(x, args[0]), values)
        out = func(*args, **kwargs)
        values = None
        outputs = (out,) if isinstance(out, Tensor) else tree_leaves(out)
        if all(x.numel() <= LARGEST for x in outputs if isinstance(x, Tensor)):
            with contextlib.suppress(_Unknown):
                values = self._compute(func, args, kwargs)
        if values is None:
            self._forget_written(func, args, kwargs)
            values = _assumed(func, args, out)
        if values is not None:
            self._remember(out, values)
        return out

    def _without_masks(self, indices: Any) -> list[Tensor | None]:
        """The indices, where each mask is replaced by the indices of the elements that it selects."""
        return [j for i in indices for j in (self._selected(i) if _is_mask(i) else (i,))]

    def _selected(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The indices of the elements that a mask selects, one tensor for each of its dimensions."""
        try:
            with _disable_current_modes():
                values = self._values(mask).nonzero()
            return self._fake_of(values, mask).unbind(1)
        except _Unknown:
            return _indices_of_all(mask).unbind(1)

    def _fake_of(self, values: Any, like: Tensor) -> Any:
        """A fake tensor with these values, on the device of ``like``; a number as it is."""
        if not isinstance(values, Tensor):
            return values
        fake = torch.empty(values.shape, dtype=values.dtype, device=like.device)
        self._remember(fake, values)
        return fake


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether the operator's result has a shape, or is a number, that depends on values."""
    if func in INDEXING:
        return any(map(_is_mask, args[1]))
    return _is_dynamic(func)


@functools.cache
def _is_ordinary(func: Any) -> bool:
    """Whether the operator is of none of the kinds above, and its result's shape depends on no values."""
    others = {*CTC_LOSS, *INDEXING, *READ_A_SHAPE, *ASSUMED}
    return func not in others and not _is_dynamic(func)


@functools.cache
def _is_dynamic(func: Any) -> bool:
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags})


def _storage(x: Tensor | None) -> int | None:
    """Tells tensors that share memory; None for none, and for a sparse one."""
    return None if x is None or x.layout != torch.strided else x.untyped_storage()._cdata


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operator writes."""
    if not func._schema.is_mutable:
        return []
    given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves([given.get(name) for name in written]) if isinstance(x, Tensor)]


def _needing_the_most(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that depends on values, where they are unknown: all elements, or false.

    Raises torch's own error for an operator that is not listed here: its fake tensors need the values.
    """
    if func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
        return False
    if func is aten.nonzero.default:
        return _indices_of_all(args[0])
    if func is aten.masked_select.default:
        return torch.broadcast_tensors(*args)[0].reshape(-1).clone()
    if func is aten.index_put_.default:
        return args[0]
    return func(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _indices_of_all(mask: Tensor) -> Tensor:
    """What ``mask.nonzero()`` returns where all are selected. The indices are zero: only their number counts."""
    return torch.zeros(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)


def _assumed(func: Any, args: Any, out: Any) -> Any:
    """Assumed values of ``out``, the operator's result for arguments without values; None where there are none."""
    if func not in ASSUMED:
        return None
    with _disable_current_modes():
        if func in (aten.all.default, aten.all.dim, aten.all.dims):
            return torch.ones(out.shape, dtype=torch.bool)
        if func in (aten.any.default, aten.any.dim, aten.any.dims, aten.isnan.default, aten.isinf.default):
            return torch.zeros(out.shape, dtype=torch.bool) if out.numel() <= LARGEST else None
        returns_indices_alone, place = isinstance(out, Tensor), DIMENSION_OF[func]
        # Without dim argmax is of the flattened tensor, for which nothing is assumed; the others take the last one.
        dim = args[place] if len(args) > place else None if returns_indices_alone else -1
        shape = out.shape if returns_indices_alone else out[1].shape
        if dim is None or not args[0].dim() or shape.numel() > LARGEST:
            return None
        indices = _in_turn(shape, args[0].shape[dim], dim if len(shape) == args[0].dim() else -1)
        return indices if returns_indices_alone else (None, indices)


def _in_turn(shape: torch.Size, below: int, dim: int) -> Tensor:
    """Indices: 0, 1, 2, ... in turn along ``dim``, modulo ``below``."""
    indices = torch.empty(shape, dtype=torch.long).movedim(dim, -1)
    return (torch.arange(indices.numel()) % below).reshape(indices.shape).movedim(-1, dim)
