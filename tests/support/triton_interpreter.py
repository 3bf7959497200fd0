"""Triton's interpreter, repaired: import first, in a process with TRITON_INTERPRET=1.

The interpreter truncates where it converts to bf16; kernels and GPUs round to nearest even. In Triton 3.6 its fma
rounds twice, its maxima keep NaN, and its scalars are no indices where numpy is new.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.support.rounding import sum_to_odd

assert os.environ.get("TRITON_INTERPRET") == "1"


def bf16_of(x: Any) -> Any:
    """The bits of fp32 values rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(x), np.uint16(0x7FFF), (rounded >> np.uint32(16)).astype(np.uint16))


def fp32_of(bits: Any) -> Any:
    """The values of bf16 bits."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def repair_bf16() -> None:
    cast = InterpreterBuilder.cast_impl
    fp_to_fp = InterpreterBuilder.create_fp_to_fp

    def exact_cast(self: Any, source: Any, to: Any) -> Any:
        old, new = source.dtype.scalar, to.scalar
        if (old, new) == (tl.bfloat16, tl.float32):
            return TensorHandle(fp32_of(source.data).reshape(source.data.shape), new)
        if (old, new) == (tl.float32, tl.bfloat16):
            return TensorHandle(bf16_of(source.data).reshape(source.data.shape), new)
        assert old == new or tl.bfloat16 not in (old, new), f"cast {old} to {new} by way of fp32 in this interpreter"
        return cast(self, source, to)

    def exact_fp_to_fp(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, to.scalar):
            return exact_cast(self, source, to)
        return fp_to_fp(self, source, to, rounding)

    def no_bf16(name: str) -> None:
        compute = getattr(InterpreterBuilder, name)

        def checked(self: Any, *args: Any) -> Any:
            # The interpreter would compute with the bits, as if they were whole numbers.
            assert all(a.dtype.scalar != tl.bfloat16 for a in args if isinstance(a, TensorHandle)), "bf16 arithmetic"
            return compute(self, *args)

        setattr(InterpreterBuilder, name, checked)

    InterpreterBuilder.cast_impl = exact_cast
    InterpreterBuilder.create_fp_to_fp = exact_fp_to_fp
    no_bf16("binary_op")
    no_bf16("unary_op")


def repair_arithmetic() -> None:
    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        assert z.dtype.scalar == tl.float32
        a, b, c = (t.data.astype(np.float64) for t in (x, y, z))
        return TensorHandle(sum_to_odd(*np.broadcast_arrays(a * b, c)).astype(np.float32), tl.float32)

    def rsqrt(self: Any, x: Any) -> Any:  # as good as a GPU's: off by less than one unit in the last place
        return TensorHandle((1 / np.sqrt(x.data.astype(np.float64))).astype(x.data.dtype), x.dtype.scalar)

    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    InterpreterBuilder.create_fma = fma
    InterpreterBuilder.create_rsqrt = rsqrt


def repair_scalars() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def repair_reductions() -> None:
    apply = interpreter.ReduceOps.apply_impl

    def fast(self: Any, input: Any) -> Any:
        # apply() takes one element after the other: a second for a tile.
        if getattr(self.combine_fn, "fn", self.combine_fn).__name__ == "_maximum_or_nan":
            return self.min_max(input[0], val_reduce_op=np.max)
        return apply(self, input)

    interpreter.ReduceOps.apply_impl = fast


repair_bf16()
repair_arithmetic()
repair_reductions()
repair_scalars()
# Kernels divide by zero and multiply infinity by zero on purpose.
np.seterr(all="ignore")
