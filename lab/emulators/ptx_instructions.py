"""Computes PTX instructions on registers, for the threads of ptx_threads: arithmetic, bits, conversions."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from lab.emulators.ptx_emulator import (
    FLOAT,
    SIGNED,
    SIZES,
    UNSIGNED,
    Array,
    Instruction,
    Kernel,
    PtxError,
    bits_of,
    directed,
    is_float,
    literal,
    unit_off,
    values,
)
from tests.support.rounding import sum_to_odd

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
MODES = {"rn", "rz", "rm", "rp"}
FLUSH = np.float32(2.0**-126)  # the smallest normal number: ftz flushes smaller ones to 0


def product(a: Array, b: Array, kind: str) -> Array:
    """The product in twice the width."""
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * SIZES[kind]]
    return a.astype(wide) * b.astype(wide)


class Instructions:
    """A register is an array with an entry per thread.

    In all methods i is the instruction, kind its last type, and at has the numbers of the threads that run it."""

    kernel: Kernel
    count: int
    special: dict[str, Array]
    symbols: dict[str, int]
    registers: dict[str, Array]

    # ---- registers

    def bits(self, name: str) -> Array:
        if name not in self.registers:
            kind = self.kernel.registers[name]
            self.registers[name] = np.zeros(self.count, bool if kind == "pred" else UNSIGNED[SIZES[kind]])
        return self.registers[name]

    def get(self, operand: str, kind: str, at: Array) -> Array:
        """The values of an operand: a register, a special register, a number or a symbol's address."""
        if kind == "pred":
            if operand[0] == "!":
                return ~self.get(operand[1:], kind, at)
            if operand not in self.kernel.registers:
                return np.full(len(at), literal(operand) != 0)
            return self.bits(operand)[at]
        if operand in self.kernel.registers:
            return values(self.bits(operand)[at], kind)
        if operand in self.special:
            return values(self.special[operand][at], kind)
        if operand in self.symbols:
            return np.full(len(at), self.symbols[operand], UNSIGNED[SIZES[kind]])
        number = literal(operand)
        if operand[:2] in ("0f", "0F", "0d", "0D"):
            size = 4 if operand[1] in "fF" else 8
            if size != SIZES[kind]:
                return np.full(len(at), np.array(number, UNSIGNED[size]).view(FLOAT[size]), FLOAT[SIZES[kind]])
        return values(np.full(len(at), number & (1 << 8 * SIZES[kind]) - 1, UNSIGNED[SIZES[kind]]), kind)

    def put(self, name: str, x: Array, kind: str, at: Array) -> None:
        if name == "_":
            return
        register = self.bits(name)
        if kind == "pred":
            register[at] = x
            return
        size = register.dtype.itemsize
        if kind[0] == "s" and SIZES[kind] < size:  # the sign is extended into a wider register
            x, kind = x.astype(SIGNED[SIZES[kind]]).astype(SIGNED[size]), f"s{8 * size}"
        register[at] = bits_of(x, kind).astype(register.dtype, copy=False)

    # ---- arithmetic

    def unary(self, i: Instruction, kind: str, at: Array, f: Callable[[Array], Array]) -> None:
        x = f(self.flushed(i, self.get(i.operands[1], kind, at)))
        self.put(i.operands[0], self.flushed(i, x), kind, at)

    def binary(self, i: Instruction, kind: str, at: Array, f: Callable[[Array, Array], Array]) -> None:
        a, b = (self.flushed(i, self.get(o, kind, at)) for o in i.operands[1:3])
        x = f(a, b)
        if is_float(kind):
            x = np.where(np.isnan(x), x.dtype.type(np.nan), x)  # GPUs' canonical NaN in place of this processor's
        self.put(i.operands[0], self.flushed(i, x), kind, at)

    @staticmethod
    def flushed(i: Instruction, x: Array) -> Array:
        if "ftz" in i.op and x.dtype == np.float32:
            return np.where(np.abs(x) < FLUSH, np.copysign(np.float32(0), x), x)
        return x

    def rounded(self, i: Instruction, kind: str, at: Array, f: Callable[[Array, Array], Array]) -> None:
        """A sum, a difference or a product of floats."""
        mode = next((m for m in MODES if m in i.op), "rn")
        if kind == "f32" and mode != "rn":
            exact = sum_to_odd if f is not operator.mul else operator.mul
            a, b = (self.get(o, kind, at).astype(np.float64) for o in i.operands[1:3])
            self.put(i.operands[0], directed(exact(a, -b if f is operator.sub else b), mode), kind, at)
        elif mode != "rn" or kind in ("f16", "bf16"):
            raise PtxError(f"unknown rounding: {i.text}")
        else:
            self.binary(i, kind, at, f)

    def do_add(self, i: Instruction, kind: str, at: Array) -> None:
        (self.rounded if is_float(kind) else self.binary)(i, kind, at, operator.add)

    def do_sub(self, i: Instruction, kind: str, at: Array) -> None:
        (self.rounded if is_float(kind) else self.binary)(i, kind, at, operator.sub)

    def do_mul(self, i: Instruction, kind: str, at: Array) -> None:
        if is_float(kind):
            self.rounded(i, kind, at, operator.mul)
        elif "lo" in i.op:
            self.binary(i, kind, at, operator.mul)
        else:
            a, b = (self.get(o, kind, at) for o in i.operands[1:3])
            self.put_product(i, product(a, b, kind), kind, at)

    def put_product(self, i: Instruction, x: Array, kind: str, at: Array) -> None:
        n = 8 * SIZES[kind]
        if "wide" in i.op:
            self.put(i.operands[0], x, f"{kind[0]}{2 * n}", at)
        else:
            self.put(i.operands[0], (x >> n).astype(UNSIGNED[SIZES[kind]]), f"u{n}", at)

    def do_mad(self, i: Instruction, kind: str, at: Array) -> None:
        a, b = (self.get(o, kind, at) for o in i.operands[1:3])
        if "lo" in i.op:
            self.put(i.operands[0], a * b + self.get(i.operands[3], kind, at), kind, at)
        elif "wide" in i.op:
            c = self.get(i.operands[3], f"{kind[0]}{16 * SIZES[kind]}", at)
            self.put_product(i, product(a, b, kind) + c, kind, at)
        else:
            raise PtxError(f"unknown instruction: {i.text}")

    def do_fma(self, i: Instruction, kind: str, at: Array) -> None:
        if kind == "bf16x2":  # rounded twice, which is exact where the kernels use it: for products plus zero
            return self.of_halves(i, at, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32))
        if kind == "f64":
            a, b, c = (self.get(o, kind, at) for o in i.operands[1:4])
            if ((a.view(np.uint64) | b.view(np.uint64)) & np.uint64((1 << 26) - 1)).any():
                raise PtxError(f"only products that are exact are known here: {i.text}")
            return self.put(i.operands[0], a * b + c, kind, at)
        if kind != "f32":
            raise PtxError(f"unknown instruction: {i.text}")
        a, b, c = (self.flushed(i, self.get(o, kind, at)).astype(np.float64) for o in i.operands[1:4])
        mode = next((m for m in MODES if m in i.op), "rn")
        self.put(i.operands[0], self.flushed(i, directed(sum_to_odd(a * b, c), mode)), kind, at)

    def do_div(self, i: Instruction, kind: str, at: Array) -> None:
        if is_float(kind):
            if "rn" not in i.op:
                raise PtxError(f"only correctly rounded divisions are known here: {i.text}")
            self.binary(i, kind, at, operator.truediv)
        else:
            self.binary(i, kind, at, self.quotient)

    def do_rem(self, i: Instruction, kind: str, at: Array) -> None:
        self.binary(i, kind, at, lambda a, b: a - self.quotient(a, b) * b)

    @staticmethod
    def quotient(a: Array, b: Array) -> Array:
        safe = np.where(b == 0, 1, b).astype(a.dtype)
        q = a // safe
        return q + ((q < 0) & (q * safe != a)).astype(a.dtype)  # towards zero

    def do_sqrt(self, i: Instruction, kind: str, at: Array) -> None:
        self.unary(i, kind, at, (lambda x: unit_off(np.sqrt(x))) if "approx" in i.op else np.sqrt)

    def do_rcp(self, i: Instruction, kind: str, at: Array) -> None:
        one = np.ones((), FLOAT[SIZES[kind]])
        self.unary(i, kind, at, (lambda x: unit_off(one / x)) if "approx" in i.op else (lambda x: one / x))

    def do_rsqrt(self, i: Instruction, kind: str, at: Array) -> None:
        self.approximate(i, kind, at, lambda x: 1 / np.sqrt(x))

    def do_ex2(self, i: Instruction, kind: str, at: Array) -> None:
        self.approximate(i, kind, at, np.exp2)

    def approximate(self, i: Instruction, kind: str, at: Array, f: Callable[[Array], Array]) -> None:
        if kind != "f32" or "approx" not in i.op:
            raise PtxError(f"unknown instruction: {i.text}")
        self.unary(i, kind, at, lambda x: unit_off(f(x.astype(np.float64)).astype(np.float32)))

    def do_abs(self, i: Instruction, kind: str, at: Array) -> None:
        pair = kind.endswith("x2")  # two 16-bit floats in a register
        self.unary(i, kind, at, (lambda x: x & np.uint32(0x7FFF7FFF)) if pair else np.abs)

    def do_neg(self, i: Instruction, kind: str, at: Array) -> None:
        pair = kind.endswith("x2")
        self.unary(i, kind, at, (lambda x: x ^ np.uint32(0x80008000)) if pair else np.negative)

    def do_copysign(self, i: Instruction, kind: str, at: Array) -> None:
        self.binary(i, kind, at, lambda sign, x: np.copysign(x, sign))

    # ---- pairs of bf16 in a register

    def halves(self, operand: str, at: Array) -> tuple[Array, Array]:
        """The low and the high half of each pair, as fp32."""
        pair = self.get(operand, "u32", at)
        low, high = pair << np.uint32(16), pair & np.uint32(0xFFFF0000)
        return low.view(np.float32), high.view(np.float32)

    def of_halves(self, i: Instruction, at: Array, f: Callable[..., Array]) -> None:
        """Applies f to the low halves and to the high halves. It returns fp32, which is rounded to bf16, or 16 bits."""
        pairs = zip(*(self.halves(operand, at) for operand in i.operands[1:]), strict=True)
        low, high = (y if y.dtype == np.uint16 else bits_of(y, "bf16") for y in (f(*operands) for operands in pairs))
        self.put(i.operands[0], high.astype(np.uint32) << np.uint32(16) | low, "b32", at)

    def do_set(self, i: Instruction, kind: str, at: Array) -> None:
        if kind != "bf16x2" or "u32" not in i.op:
            raise PtxError(f"unknown instruction: {i.text}")
        name = i.op[1]

        def mask(a: Array, b: Array) -> Array:
            nan = np.isnan(a) | np.isnan(b)
            holds = COMPARE[name[:-1]](a, b) | nan if name.endswith("u") else COMPARE[name](a, b) & ~nan
            return np.where(holds, np.uint16(0xFFFF), np.uint16(0))

        self.of_halves(i, at, mask)

    def do_min(self, i: Instruction, kind: str, at: Array) -> None:
        if kind == "bf16x2":
            return self.of_halves(i, at, np.fmin)
        self.binary(i, kind, at, np.minimum if "NaN" in i.op or not is_float(kind) else np.fmin)

    def do_max(self, i: Instruction, kind: str, at: Array) -> None:
        if kind == "bf16x2":
            return self.of_halves(i, at, np.fmax)
        self.binary(i, kind, at, np.maximum if "NaN" in i.op or not is_float(kind) else np.fmax)

    # ---- bits

    def logic(self, i: Instruction, kind: str, at: Array) -> None:
        self.binary(i, kind, at, LOGIC[i.op[0]])

    do_and = do_or = do_xor = logic

    def do_not(self, i: Instruction, kind: str, at: Array) -> None:
        self.unary(i, kind, at, operator.invert)

    def do_shl(self, i: Instruction, kind: str, at: Array) -> None:
        self.shifted(i, kind, at, operator.lshift)

    def do_shr(self, i: Instruction, kind: str, at: Array) -> None:
        self.shifted(i, kind, at, operator.rshift)

    def shifted(self, i: Instruction, kind: str, at: Array, f: Callable[[Array, Array], Array]) -> None:
        x, by = self.get(i.operands[1], kind, at), self.get(i.operands[2], "u32", at)
        top = 8 * SIZES[kind] - 1
        beyond = f(x, np.full(len(at), top, x.dtype)) if kind[0] == "s" and f is operator.rshift else np.zeros_like(x)
        self.put(i.operands[0], np.where(by > top, beyond, f(x, np.minimum(by, top).astype(x.dtype))), kind, at)

    def do_shf(self, i: Instruction, kind: str, at: Array) -> None:
        low, high, by = (self.get(o, "u32", at).astype(np.uint64) for o in i.operands[1:4])
        by = by & np.uint64(31) if "wrap" in i.op else np.minimum(by, np.uint64(32))
        both = high << np.uint64(32) | low
        shifted = both >> by if "r" in i.op else (both << by) >> np.uint64(32)
        self.put(i.operands[0], shifted.astype(np.uint32), "b32", at)

    def do_clz(self, i: Instruction, kind: str, at: Array) -> None:
        x = self.get(i.operands[1], kind, at).astype(np.uint64)
        digits = sum((x >> np.uint64(k) != 0).astype(np.uint32) for k in range(8 * SIZES[kind]))
        self.put(i.operands[0], np.uint32(8 * SIZES[kind]) - digits, "u32", at)

    def do_popc(self, i: Instruction, kind: str, at: Array) -> None:
        self.put(i.operands[0], np.bitwise_count(self.get(i.operands[1], kind, at)).astype(np.uint32), "u32", at)

    def do_bfe(self, i: Instruction, kind: str, at: Array) -> None:
        x = self.get(i.operands[1], kind, at)
        first, count = (self.get(o, "u32", at).astype(np.int64) & 255 for o in i.operands[2:4])
        if (first + count > 8 * SIZES[kind]).any() or (count == 0).any():
            raise PtxError(f"a field that reaches out of its word is not known here: {i.text}")
        left = (8 * SIZES[kind] - first - count).astype(x.dtype)
        self.put(i.operands[0], (x << left) >> (left + first.astype(x.dtype)), kind, at)

    def do_bfi(self, i: Instruction, kind: str, at: Array) -> None:
        a, b = (self.get(o, kind, at).astype(np.uint64) for o in i.operands[1:3])
        first, count = (self.get(o, "u32", at).astype(np.uint64) & np.uint64(255) for o in i.operands[3:5])
        mask = ((np.uint64(1) << count) - np.uint64(1)) << first
        self.put(i.operands[0], (b & ~mask | a << first & mask).astype(UNSIGNED[SIZES[kind]]), kind, at)

    def do_prmt(self, i: Instruction, kind: str, at: Array) -> None:
        a, b, c = (self.get(o, "u32", at).astype(np.uint64) for o in i.operands[1:4])
        both, result = b << np.uint64(32) | a, np.zeros(len(at), np.uint64)
        for k in range(4):
            choice = c >> np.uint64(4 * k) & np.uint64(15)
            byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            byte = np.where(choice >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
            result |= byte << np.uint64(8 * k)
        self.put(i.operands[0], result.astype(np.uint32), "b32", at)

    def do_lop3(self, i: Instruction, kind: str, at: Array) -> None:
        a, b, c = (self.get(o, "u32", at) for o in i.operands[1:4])
        table, result = literal(i.operands[4]), np.zeros(len(at), np.uint32)
        for k in range(8):
            if table >> k & 1:
                result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        self.put(i.operands[0], result, "b32", at)

    # ---- moving, choosing, converting

    def do_mov(self, i: Instruction, kind: str, at: Array) -> None:
        target, source = i.operands
        if target[0] == "{":  # one register into several
            names = target.strip("{} ").replace(" ", "").split(",")
            n = 8 * SIZES[kind] // len(names)
            x = self.get(source, kind, at).astype(np.uint64)
            for k, name in enumerate(names):
                self.put(name, (x >> np.uint64(k * n)).astype(UNSIGNED[n // 8]), f"b{n}", at)
        elif source[0] == "{":
            names = source.strip("{} ").replace(" ", "").split(",")
            n = 8 * SIZES[kind] // len(names)
            parts = [self.get(name, f"b{n}", at).astype(np.uint64) << np.uint64(k * n) for k, name in enumerate(names)]
            self.put(target, sum(parts, np.zeros(len(at), np.uint64)).astype(UNSIGNED[SIZES[kind]]), kind, at)
        else:
            self.put(target, self.get(source, kind, at), kind, at)

    def do_selp(self, i: Instruction, kind: str, at: Array) -> None:
        a, b = (self.get(o, kind, at) for o in i.operands[1:3])
        self.put(i.operands[0], np.where(self.get(i.operands[3], "pred", at), a, b), kind, at)

    def do_setp(self, i: Instruction, kind: str, at: Array) -> None:
        if kind == "bf16x2":  # p|q: of the first and of the second of each pair
            if i.op[1] not in COMPARE or len(i.op) != 3:
                raise PtxError(f"unknown instruction: {i.text}")
            pairs = zip(*(self.halves(o, at) for o in i.operands[1:3]), strict=True)
            for target, (a, b) in zip(i.operands[0].split("|"), pairs, strict=True):
                self.put(target, COMPARE[i.op[1]](a, b) & ~(np.isnan(a) | np.isnan(b)), "pred", at)
            return
        a, b = (self.flushed(i, self.get(o, kind, at)) for o in i.operands[1:3])
        name = i.op[1]
        nan = np.isnan(a) | np.isnan(b) if is_float(kind) else np.zeros(len(at), bool)
        if name in ("num", "nan"):
            holds = nan if name == "nan" else ~nan
        elif is_float(kind) and name.endswith("u"):
            holds = COMPARE[name[:-1]](a, b) | nan
        else:
            holds = COMPARE[name](a, b) & ~nan
        target, *inverse = i.operands[0].split("|")
        combine = next((LOGIC[x] for x in i.op[2:-1] if x in LOGIC), None)
        third = self.get(i.operands[3], "pred", at) if combine else holds
        self.put(target, combine(holds, third) if combine else holds, "pred", at)
        if inverse:
            self.put(inverse[0], combine(~holds, third) if combine else ~holds, "pred", at)

    def do_cvt(self, i: Instruction, source: str, at: Array) -> None:
        target = i.op[-2]
        if target in ("f16x2", "bf16x2"):
            high, low = (bits_of(self.get(o, source, at), target[:-2]).astype(np.uint32) for o in i.operands[1:3])
            self.put(i.operands[0], high << np.uint32(16) | low, "b32", at)
            return
        x = self.flushed(i, self.get(i.operands[1], source, at))
        to_whole = next((ROUND[r] for r in i.op if r in ROUND), None)
        if is_float(source) and to_whole:
            x = to_whole(x)
        if is_float(source) and not is_float(target):
            types = SIGNED if target[0] == "s" else UNSIGNED
            lowest, highest = np.iinfo(types[SIZES[target]]).min, np.iinfo(types[SIZES[target]]).max
            exact = np.where(np.isnan(x), 0, x).astype(np.float64)
            clipped = np.clip(exact, float(lowest), float(highest))
            x = np.where(clipped >= float(highest), highest, np.where(clipped < highest, clipped, 0).astype(types[8]))
        elif not is_float(source) and is_float(target) and "rn" not in i.op:
            raise PtxError(f"unknown rounding: {i.text}")
        elif "sat" in i.op:
            raise PtxError(f"unknown instruction: {i.text}")
        elif not is_float(source) and not is_float(target):
            x = x.astype((SIGNED if source[0] == "s" else UNSIGNED)[8]).view(np.uint64)
        if is_float(target) and not is_float(source) and target in ("f16", "bf16"):
            x = x.astype(np.float64)
        self.put(i.operands[0], x, target, at)
