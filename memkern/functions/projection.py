"""Random projections of tokens: S (k x N) with E[S^T S] = (k / N) I, made from a seed whenever it is applied.

========  =========================================================================================
``rows``  k of the N rows of I, without replacement
``dct``   k of the N rows of the orthonormal DCT-II, without replacement, times a random sign per column
========  =========================================================================================

So ``N / k (S Y)^T (S X)`` is an unbiased estimate of ``Y^T X``. With ``D = sum_i |x_i|^2 |y_i|^2``, its total
variance is::

    (N D - |Y^T X|^2) / k * (N - k) / (N - 1)

for ``rows``; with replacement the factor (N - k) / (N - 1) would be missing. For ``dct`` the formula holds with
``D = sum_f |x'_f|^2 |y'_f|^2`` of the transformed rows x' and y'. This D is about (|X|^2 |Y|^2 + 2 |Y^T X|^2) / N,
however the rows' norms differ.

``rows`` has the least variance where the products |x_i| |y_i| are alike, and costs no arithmetic; ``dct`` is the safe
choice where a few tokens carry most of the gradient.

The seed is two 32-bit words in an int64 tensor on the tokens' device. Random numbers are a hash of seed and position,
so that the backward pass repeats them without a generator, a host synchronization or a tensor as large as S.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..quant.layout import arithmetic
from .autograd import constant

WORD = 0xFFFFFFFF  # the mask of a 32-bit word
CHUNK = 1 << 22  # elements that are transformed at a time


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Two random words; those of a ``generator`` on another device are copied without a synchronization."""
    source = device if generator is None else generator.device
    seed = torch.randint(WORD + 1, (2,), dtype=torch.int64, device=source, generator=generator)
    return seed.to(device, non_blocking=True)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (T. Mueller's integer hash); every product stays below 2^63."""
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & WORD
    return (x >> 16) ^ x


def words(seed: Tensor, stream: int, position: Tensor) -> Tensor:
    """A random 32-bit word, as int64, for each position. Different numbers ``stream`` give independent words."""
    return _mix(_mix(position ^ _mix(seed[0] ^ stream)) ^ seed[1])


def _signs(seed: Tensor, stream: int, n: int, dtype: torch.dtype) -> Tensor:
    """n random signs."""
    bits = words(seed, stream, torch.arange(n, device=seed.device)) & 1
    return bits.to(dtype) * 2 - 1


def _sample(seed: Tensor, stream: int, n: int, k: int) -> Tensor:
    """k of n indices without replacement; the sort is stable, so that the backward pass gets the same ones."""
    return words(seed, stream, torch.arange(n, device=seed.device)).argsort(stable=True)[:k]


def _rows(x: Tensor, k: int, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """k rows of x."""
    return x.index_select(0, _sample(seed, 0, len(x), k)).to(dtype)


def _dct(x: Tensor, k: int, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """k rows of the orthonormal DCT-II of x with random signs, by Makhoul's algorithm: with V the FFT of the even
    tokens and then the reversed odd ones, row f is ``norm * Re(exp(-i angle) * V_f)``, angle = pi f / (2 n)."""
    n = len(x)
    wide = arithmetic(x.dtype)  # no FFT takes bf16
    index = torch.arange(n, device=x.device)
    order = torch.cat([index[::2], index[1::2].flip(0)])
    signs = _signs(seed, 1, n, wide).unsqueeze(1)
    frequency = _sample(seed, 0, n, k)
    mirrored = frequency > n // 2  # where rfft returns no V_f: it is the conjugate of V_(n - f)
    spectrum_rows = torch.where(mirrored, n - frequency, frequency)
    angle = frequency.unsqueeze(1).to(wide) * (constant(math.pi) / (2 * n))
    # The orthonormal factor: sqrt(2 / n), and sqrt(1 / n) for frequency 0.
    norm = torch.where(frequency == 0, 0.5, 1.0).to(wide).mul(2 / n).sqrt().unsqueeze(1)
    factor_of_real = norm * angle.cos()
    factor_of_imaginary = norm * angle.sin() * torch.where(mirrored, -1, 1).unsqueeze(1)
    out = []
    for columns in x.split(max(1, CHUNK // n), dim=1):
        spectrum = torch.view_as_real(torch.fft.rfft(columns.index_select(0, order).to(wide) * signs, dim=0))
        rows = spectrum.index_select(0, spectrum_rows)
        out.append((factor_of_real * rows[..., 0] + factor_of_imaginary * rows[..., 1]).to(dtype))
    return torch.cat(out, dim=1)


PROJECTIONS: dict[str, Callable[..., Tensor]] = {"rows": _rows, "dct": _dct}


def project(x: Tensor, k: int, projection: str, seed: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``S x`` in ``dtype`` (default x's) for x (N, C): (k, C). The same S wherever N, k and seed are the same."""
    return PROJECTIONS[projection](x, k, seed, dtype or x.dtype)
