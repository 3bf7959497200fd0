"""Tensors in which kernels run their main loops several times, and every alignment; those of smoke.py are too small."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import memkern
from memkern import _ops, optim
from memkern.fewbit.tables import LEVELS

NUMEL = 2**22  # some 3,000 elements for each thread block that an H200 runs at once; a turn takes 512
LARGE: dict[str, tuple[int, ...]] = {
    "whole blocks, a short last tile": (NUMEL // 128 + 3, 128),
    "a short last block": (1, NUMEL + 37),
    "rows of 1,600": (2621, 1600),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("AdamW8bit", "Lion8bit", "LAMB8bit", "LARS8bit", "SGD8bit", "AdamW")},
    "AdamW8bit, dynamic": {"codec": "dynamic"},
    "AdamW8bit, bf16+8": {"master_weights": "bf16+8"},
}
OFFSETS = range(1, 8)  # in elements, of a storage that begins on 16 bytes
STEPS = 2

Compare = Callable[[str, str], str]
Same = Callable[[Any, Any, str], None]


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, offset: int = 0, scale: float = 1.0) -> Tensor:
    """Of several magnitudes, some elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel() + offset
    x = torch.randn(n, generator=generator) * torch.tensor([1e-3, 1.0, 30.0])[torch.arange(n) // 1000 % 3]
    return (scale * x).to(dtype)[offset:].view(shape)


def stepped(
    name: str, dtype: torch.dtype, device: str, backend: str, offsets: bool, at: Any
) -> list[tuple[str, Tensor]]:
    """Parameters and states after some steps. ``offsets``: of small tensors, each with gradients off 16 bytes."""
    if offsets:
        shapes = {f"offset {k}, gradient's {j}": ((37, 640), k, j) for k in (0, 1, 4) for j in OFFSETS}
    else:
        shapes = {layout: (shape, 0, 0) for layout, shape in LARGE.items()}
    params = [
        torch.nn.Parameter(at(values(shape, i, dtype, k, 0.1), device))
        for i, (shape, k, _) in enumerate(shapes.values())
    ]
    optimizer = getattr(optim, name.partition(",")[0])(params, lr=1e-2, weight_decay=0.1, **OPTIMIZERS[name])
    with memkern.use_backend(backend):
        for step in range(STEPS):
            for i, (p, (shape, _, j)) in enumerate(zip(params, shapes.values(), strict=True)):
                p.grad = at(values(shape, 100 * step + i, dtype, j), device)
            optimizer.step()
    found = []
    for layout, p in zip(shapes, params, strict=True):
        found += [(layout, p), *((f"{layout}: {key}", x) for key, x in optimizer.state[p].items())]
    return found


def cases(dtypes: tuple[torch.dtype, ...], same: Same, alike: Any, at: Any, differs: Any) -> Iterator[Any]:
    for dtype, name, offsets in itertools.product(dtypes, OPTIMIZERS, (False, True)):
        if "bf16+8" in name and dtype != torch.bfloat16:
            continue

        def compare(backend: str, device: str, dtype=dtype, name=name, offsets=offsets) -> str:
            pair = (backend, device), ("reference", "cpu")
            runs = [stepped(name, dtype, d, b, offsets, at) for b, d in pair]
            try:
                for (what, a), (_, e) in zip(*runs, strict=True):
                    same(a, e, what)
            except differs:
                # LAMB's and LARS's norms are sums, in another order than the reference's.
                if name[:2] != "LA" or not alike(*runs):
                    raise
                return "near"
            return "equal"

        yield f"large {name} {dtype}", "every alignment" if offsets else "2^22 elements", compare
    for dtype, layout in itertools.product(dtypes, LARGE):

        def codes(backend: str, device: str, dtype=dtype, layout=layout) -> str:
            x, results = values(LARGE[layout], 1, dtype), []
            for b, d in ((backend, device), ("reference", "cpu")):
                with memkern.use_backend(b):
                    there = at(x, d)
                    found = []
                    for codec in ("power", "dynamic"):
                        made = _ops.quantize_blockwise(there, codec, True, 128, None)
                        found += [*made, _ops.dequantize_blockwise(*made, codec, 128, dtype)]
                    planes = _ops.few_bit_encode(there, LEVELS["gelu", 3])
                    found += [planes, _ops.few_bit_backward(there, planes, LEVELS["gelu", 3].levels)]
                results.append(found)
            for i, (a, e) in enumerate(zip(*results, strict=True)):
                same(a, e, f"result {i}")
            return "equal"

        yield f"large codes {dtype}", layout, codes
