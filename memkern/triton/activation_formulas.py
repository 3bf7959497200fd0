"""Activations of one element in fp32. Mirror: ``activate`` in csrc/cuda/activation.cuh.

Triton's own exp is ``ex2.approx`` of a product, whose error grows to |x| ulp, and its tanh and log1p are in NVIDIA's
libdevice only. Those here are within two or three ulp on every device and in the interpreter. Polynomials are minimax
in relative error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quant.codec import ACTIVATIONS

GELU = tl.constexpr(ACTIVATIONS["gelu"])
GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
SILU = tl.constexpr(ACTIVATIONS["silu"])
TANH = tl.constexpr(ACTIVATIONS["tanh"])
SIGMOID = tl.constexpr(ACTIVATIONS["sigmoid"])
SOFTPLUS = tl.constexpr(ACTIVATIONS["softplus"])
MISH = tl.constexpr(ACTIVATIONS["mish"])
HARDSWISH = tl.constexpr(ACTIVATIONS["hardswish"])
QUICK_GELU = tl.constexpr(ACTIVATIONS["quick_gelu"])
RELU = tl.constexpr(ACTIVATIONS["relu"])
LEAKY_RELU = tl.constexpr(ACTIVATIONS["leaky_relu"])
HARDTANH = tl.constexpr(ACTIVATIONS["hardtanh"])
ELU = tl.constexpr(ACTIVATIONS["elu"])
CELU = tl.constexpr(ACTIVATIONS["celu"])
SELU = tl.constexpr(ACTIVATIONS["selu"])
LOGSIGMOID = tl.constexpr(ACTIVATIONS["logsigmoid"])
SOFTSIGN = tl.constexpr(ACTIVATIONS["softsign"])
TANHSHRINK = tl.constexpr(ACTIVATIONS["tanhshrink"])
HARDSIGMOID = tl.constexpr(ACTIVATIONS["hardsigmoid"])
HARDSHRINK = tl.constexpr(ACTIVATIONS["hardshrink"])
SOFTSHRINK = tl.constexpr(ACTIVATIONS["softshrink"])
THRESHOLD = tl.constexpr(ACTIVATIONS["threshold"])

_INF = tl.constexpr(float("inf"))
_SIGN_BIT = tl.constexpr(-(2**31))
_TO_INT = tl.constexpr(1.5 * 2**23)  # x + _TO_INT - _TO_INT is x rounded to an integer


@triton.jit
def exp(x):
    """2^n exp(r), r = x - n log 2; 2^n as a product of two powers, because 2^128 overflows."""
    n = tl.math.fma(x, 1.4426950408889634, _TO_INT) - _TO_INT
    r = tl.math.fma(n, -0.693145751953125, x)
    r = tl.math.fma(n, -1.428606765330187e-06, r)
    half = (n * 0.5 + _TO_INT) - _TO_INT
    y = tl.math.exp2(r * 1.4426950408889634) * tl.math.exp2(half) * tl.math.exp2(n - half)
    y = tl.where(x > 88.8, _INF, y)
    return tl.where(x < -104.0, 0.0, y)


@triton.jit
def tanh(x):
    a = tl.abs(x)
    s = x * x
    p = tl.math.fma(s, -0.00656509, 0.0212852)
    p = tl.math.fma(s, p, -0.05390547)
    p = tl.math.fma(s, p, 0.13333094)
    p = tl.math.fma(s, p, -0.33333332)
    small = tl.math.fma(x * s, p, x)
    large = 1.0 - tl.math.div_rn(2.0, exp(2.0 * a) + 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(a < 0.55, small, large)


@triton.jit
def log1p_to_one(w):
    """log(1 + w) for 0 <= w <= 1: 2 artanh(w / (2 + w))."""
    q = tl.math.div_rn(w, 2.0 + w)
    s = q * q
    p = tl.math.fma(s, 0.11598529, 0.10856814)
    p = tl.math.fma(s, p, 0.14295873)
    p = tl.math.fma(s, p, 0.19999863)
    p = tl.math.fma(s, p, 0.33333334)
    twice = q + q
    return tl.math.fma(twice * s, p, twice)


@triton.jit
def sigmoid(x):
    return tl.math.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0."""
    t = tanh(0.5 * x)
    return tl.math.div_rn(2.0 * t, 1.0 - t)


@triton.jit
def activate(x, A: tl.constexpr, B: tl.constexpr, FN: tl.constexpr):
    """A, B: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds, ELU's and CELU's alpha, threshold's
    threshold and value, the shrinking functions' lambd and lambd rounded to the dtype of x."""
    if FN == GELU:
        y = x * 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif FN == GELU_TANH:
        inner = 0.7978845608028654 * tl.math.fma(x * x * x, 0.044715, x)
        y = 0.5 * x * (1.0 + tanh(inner))
    elif FN == SILU:
        y = tl.math.div_rn(x, 1.0 + exp(-x))
    elif FN == TANH:
        y = tanh(x)
    elif FN == SIGMOID:
        y = sigmoid(x)
    elif FN == SOFTPLUS:
        scaled = x * A
        soft = tl.maximum(scaled, 0.0) + log1p_to_one(exp(-tl.abs(scaled)))
        y = tl.where(scaled > B, x, tl.math.div_rn(soft, A))
        y = tl.where(x == x, y, x)
    elif FN == MISH:
        e = exp(x)
        n = e * (e + 2.0)  # tanh(log(1 + e)) = n / (n + 2)
        y = tl.where(x > 20.0, x, x * tl.math.div_rn(n, n + 2.0))
    elif FN == HARDSWISH:
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * 0.16666667
        y = tl.where(x == x, y, x)
    elif FN == QUICK_GELU:
        y = x * sigmoid(1.702 * x)
    elif FN == RELU:
        y = tl.where(x < 0, 0.0, x)
    elif FN == LEAKY_RELU:
        y = tl.where(x > 0, x, x * A)
    elif FN == HARDTANH:
        y = tl.where(x < A, A, tl.where(x > B, B, x))
    elif FN == ELU:
        y = tl.where(x > 0, x, A * expm1(x))
    elif FN == CELU:
        y = tl.where(x > 0, x, A * expm1(tl.math.div_rn(x, A)))
    elif FN == SELU:
        y = tl.where(x > 0, 1.0507009873554805 * x, 1.7580993408473766 * expm1(x))  # scale, scale alpha
    elif FN == LOGSIGMOID:
        y = tl.where(x < 0, x, 0.0) - log1p_to_one(exp(-tl.abs(x)))
    elif FN == SOFTSIGN:
        y = tl.math.div_rn(x, 1.0 + tl.abs(x))
    elif FN == TANHSHRINK:
        y = x - tanh(x)
    elif FN == HARDSIGMOID:
        y = tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 1.0, (x + 3.0) * 0.16666667))
    elif FN == HARDSHRINK:
        y = tl.where(tl.abs(x) <= B, 0.0, x)
    elif FN == SOFTSHRINK:
        y = tl.where(tl.abs(x) <= A, 0.0, tl.where(x > 0, x - A, x + A))
    else:
        y = tl.where(x <= A, B, x)
    return y


# Coefficients of a, a^2, ... of log2(1 - erf(a / sqrt(2))), and of that with GELU_TANH's tanh instead of erf.
GELU_LOG = tl.constexpr(
    (-1.15089750289917, -0.4601901173591614, -0.051279813051223755, 0.006769770756363869, -0.00042125486652366817)
)  # fmt: skip
GELU_TANH_LOG = tl.constexpr(
    (-1.151023030281067, -0.4596197307109833, -0.05010935664176941, 0.004704978317022324, 0.0033134908881038427,
     -0.002342691645026207, 0.00043774291407316923, -2.7559090085560456e-05)
)  # fmt: skip


@triton.jit
def gelu_of_bf16(x, LOG: tl.constexpr, COUNT: tl.constexpr):
    """GELU of bf16 values in fp32: rounded to bf16 it is what :func:`activate` gives, for each of the 65,536.

    1 - erf is a power of two, whose exponent is a short polynomial: its coefficients were fitted to the intervals in
    which results are rounded alike, with CUDA 13's erf (docs/numerics.md), and two ulp more or less of the power change
    no result. That is 28 instructions per element on sm_90 instead of 53, codes included. Of fp16 about 150 results
    would change even with the exact exponent, left of -2.5, where 1 + erf cancels: it keeps the formula.
    """
    a = tl.abs(x)
    log = tl.math.fma(a, LOG[COUNT - 1], LOG[COUNT - 2])
    for i in tl.static_range(3, COUNT + 1):
        log = tl.math.fma(a, log, LOG[COUNT - i])
    half = 0.5 * x
    y = tl.math.fma(tl.abs(half), 1.0 - tl.math.exp2(log * a), half)
    # The sum of -x / 2 and x / 2 is 0, where -0 is expected.
    sign = x.to(tl.int32, bitcast=True) & _SIGN_BIT
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
