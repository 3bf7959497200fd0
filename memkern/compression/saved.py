"""``with memkern.quantize_saved(bits=8):`` what autograd saves is saved once, in 8 bits, and the rest recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..quant.layout import FLOATS, is_dense
from . import codecs, resolve, values
from .resolve import Resolver
from .values import Edge, Hooks, Leaf, Stored, Value, register, registered

EXACT = "exact"
_CHECKPOINT = "torch.utils.checkpoint"
MIN_NUMEL = 1024
"""Smaller tensors are not worth codes: they are saved as torch does, once."""


def check_bits(bits: Any, name: str = "bits") -> None:
    """Raises ValueError unless ``bits`` is 8 or "exact"."""
    if isinstance(bits, bool) or bits not in (8, EXACT):
        raise ValueError(f"{name} must be 8 or 'exact', got {bits!r}")


class _Packed:
    """What autograd holds in place of a tensor."""

    __slots__ = ("dtype", "stride", "value")

    def __init__(self, value: Value, x: Tensor) -> None:
        value.uses += 1
        self.value, self.dtype = value, x.dtype
        self.stride = x.stride() if is_dense(x.shape, x.stride()) else None

    def tensor(self) -> Tensor:
        x = values.evaluate(self.value).to(self.dtype)
        if self.stride is None or x.stride() == self.stride:
            return x
        return torch.empty_strided(x.shape, self.stride, dtype=x.dtype, device=x.device).copy_(x)


class Session:
    """The hooks of one ``with`` block, or of one forward pass of a module; ``bits`` None saves as torch does."""

    def __init__(self, bits: int | str | None) -> None:
        self.bits, self.exact = bits, bits == EXACT
        self.opened = True
        self.outer: Hooks | None = None
        self.inside: Session | None = None
        self.coded: list[weakref.ref[Stored]] = []
        self.constants: dict[int, tuple[weakref.ref, Any, weakref.ref[Stored]]] = {}

    def enter(self) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and top[0].__module__ == _CHECKPOINT:
            # Inside of a checkpoint nothing is saved; its hooks count, and the recomputation must come to the same.
            self.opened = False
            return
        ours = getattr(top[0], "__self__", None) if top else None
        if isinstance(ours, Session):
            self.inside, self.outer = ours, ours.outer
        else:
            self.outer = top
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def exit(self, passing: Iterable[Tensor] = ()) -> None:
        """passing: tensors that whoever calls holds for a moment only."""
        if not self.opened:
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if self.inside is not None:
            self.inside.coded += self.coded
        else:
            self._hold_what_is_alive({x.untyped_storage()._cdata for x in passing})
        self.coded, self.constants = [], {}

    def _hold_what_is_alive(self, passing: set[int]) -> None:
        """What the caller holds anyway, such as cached keys and values, need not be held in codes beside it."""
        for ref in self.coded:
            if (stored := ref()) is not None:
                stored.hold_if_alive(passing)

    # ---- the hooks

    def pack(self, x: Tensor) -> Any:
        if (
            self.bits is None
            or type(x) not in _KNOWN
            or x.layout != torch.strided
            or x.is_conj()
            or x.is_neg()
        ):
            return _Packed(Stored(x, x.dtype, None, self.outer), x)
        if x.grad_fn is None:  # also where torch does not show it to the hooks: then nothing is coded
            return _Packed(Leaf(x) if x.requires_grad else self._constant(x), x)
        return _Packed(self._value(x), x)

    def unpack(self, packed: _Packed) -> Tensor:
        if values.peeked(packed.value):
            return torch.empty(0)
        with torch.no_grad():
            return packed.tensor()

    def _value(self, x: Tensor) -> Value:
        edge = Edge(x.grad_fn, x.output_nr)
        # Once changed in place, x need not be what its operation made of its inputs: only views are seen through.
        views_only = x._version > 0
        value = Resolver(self.exact, views_only).resolve(edge, x.dtype)
        return self._store(edge, x, views_only) if value is None else value

    def _store(self, edge: Edge, x: Tensor, views_only: bool) -> Value:
        root, data = resolve.root(edge, x, views_only)
        codec = self._codec(root, data)
        if codec is None and resolve.finer(data.dtype, root.dtype):
            data = data.to(root.dtype)
        old = registered(root)
        if isinstance(old, Stored) and old.codec is None and codec is None and old.fresh():
            old.upgrade(data)
            stored = old
        else:
            stored = Stored(data, root.dtype, codec, self.outer)
            register(root, stored)
            self._note(stored)
        if root == edge:
            return stored
        value = Resolver(self.exact, views_only).resolve(edge, x.dtype)
        return stored_itself(edge, x, self.outer) if value is None else value

    def _codec(self, root: Edge, data: Tensor) -> codecs.Codec | None:
        if (
            self.exact
            or data.numel() < MIN_NUMEL
            or data.shape[-1] == 1
            or not {data.dtype, root.dtype} <= {*FLOATS}
        ):
            return None
        return codecs.CODECS.get(resolve.codec_of(root) or "")

    def _note(self, stored: Stored) -> None:
        if stored.codec is not None:
            self.coded.append(weakref.ref(stored))
            if len(self.coded) % 512 == 0:  # one block may hold a whole training loop
                self.coded = [ref for ref in self.coded if ref() is not None]

    def _constant(self, x: Tensor) -> Stored:
        """What needs no gradient is never rounded; masks become bits."""
        if isinstance(x, FakeTensor) or x.numel() < MIN_NUMEL:
            return Stored(x, x.dtype, None, self.outer)
        storage = x.untyped_storage()
        place = (x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        known = self.constants.get(storage._cdata)
        if (
            known is not None
            and known[0]() is storage
            and known[1] == place
            and (stored := known[2]()) is not None
        ):
            return stored
        stored = Stored(x, x.dtype, codecs.CONSTANT, self.outer)
        self.constants[storage._cdata] = weakref.ref(storage), place, weakref.ref(stored)
        self._note(stored)
        return stored


def stored_itself(edge: Edge, x: Tensor, outer: Hooks | None) -> Stored:
    stored = Stored(x, x.dtype, None, outer)
    register(edge, stored)
    return stored


_KNOWN = (Tensor, torch.nn.Parameter, FakeTensor)


class quantize_saved:
    """A context in which autograd saves each value once, and in 8 bits: the same training loop, a seventh of the bytes.

    ::

        with memkern.quantize_saved(bits=8):
            loss = model(batch).loss
        loss.backward()  # inside of the block or after it

    Three rules find what need not be saved; memkern/compression/rules.py has the table of operations:

    - copies of parameters in another dtype, which autocast makes, are not saved: the parameter and its version are;
    - a value that is saved by several operations, also as a view or a cast of itself, is saved once;
    - outputs of elementwise functions, products, normalized rows, embeddings and gathers whose inputs are saved
      already are computed anew.

    What is left, and what a matrix product, a convolution, attention, a norm or an elementwise function has made, is
    stored in block-wise 8-bit codes (:func:`memkern.quantize_blockwise`, power, to the nearest; unsigned for
    probabilities and ReLU). Everything else is saved as torch does, among it all that needs no gradient: attention's
    log-sum-exp, means and inverse deviations. Masks of two values become bits and indices fewer bytes, exactly.

    Args:
        bits: ``8``, or ``"exact"``: the rules without codes. Gradients then differ from torch's by rounding of the
            rows of norms at most, and in most models by nothing.

    Bytes per element of what is left: 1.03 (codes and a scale for 128) in place of 4 or 2. Of four layers of width 512
    at 512 tokens that is .09 to .19 of torch's in fp32 and .12 to .19 under autocast; ``"exact"`` .36 to .70 and .29 to
    .44 (benchmarks/results/saved-models.csv). Relative error of the whole gradient by what alone is coded, of a small
    Llama (benchmarks/results/saved-errors.csv): queries and keys 1.4 % (it goes through an exponential),
    log-probabilities .8 %, values and attention's output .4 %, inputs of norms .3 %, gate and up .3 %; all of them
    1.8 %. In the median over the parameter tensors of the larger models above, .1 to 1.3 %.

    In-place changes: what is stored in codes keeps the value that was saved; anything else that was changed between
    forward and backward, also a parameter by an optimizer's step, raises as in torch. Not seen are changes through
    ``.data``, as in torch, and under ``no_grad`` those of a value that no operation has saved: what is made of it later
    may be computed anew from the value before. NaN and inf survive.

    Around a block whose loss subtracts what is nearly equal, such as ``mse_loss(model(x), y)`` of a model that fits
    well, the prediction is coded too and its difference is not: compute such a loss after the block.

    What the caller still holds when the block ends (cached keys and values, hidden states) is not held in codes beside
    it. Hooks that are open around the block get what is stored, so that under ``torch.autograd.graph.save_on_cpu()``
    codes travel. Inside of activation checkpoints nothing happens; their inputs are coded. Around a function of
    torch.compile nothing is stored in codes, as the compiler decides what is saved; inside of one, ``fullgraph=True``
    refuses it. torch.func's transforms refuse saved-tensor hooks.

    Raises:
        ValueError: bits is neither 8 nor "exact".
    """

    def __init__(self, bits: int | str = 8) -> None:
        check_bits(bits)
        self.bits = bits
        self._sessions: list[Session] = []

    def __enter__(self) -> quantize_saved:
        session = Session(self.bits)
        session.enter()
        self._sessions.append(session)
        return self

    def __exit__(self, *_: Any) -> None:
        self._sessions.pop().exit()
