"""Drives every C++ op over awkward tensors; tests/build/test_sanitizers.py runs it with an instrumented build.

It exits with 0 where nothing is found.

- ``python sanitized.py``: every op.
- ``python sanitized.py guards [OP ...]``: tensors of every size and stride pattern.
- ``python sanitized.py loops``: random training loops for MEMKERN_FUZZ_SECONDS.
- ``python sanitized.py overflow ISA``: reads past the end of a tensor on purpose; the sanitizer must stop it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from memkern import backend
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import CODECS
from memkern.quant.layout import layout_of
from memkern.schemas import STEP_OPS
from tests.support import guarded
from tests.support.step_lists import MOMENTS, pack

ISAS = ("generic", "avx2", "avx512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (8, 24, 128, 4096)
NON_FINITE = (float("nan"), float("inf"), -float("inf"), 1e38, 1e-42)

# Each tensor is an allocation of its own and ends where that ends, so that one element too far is one too many.
New = Callable[..., Tensor]
LAYOUTS: dict[str, Callable[[New], Tensor]] = {
    "0-dim": lambda new: new(),
    "one element": lambda new: new(1),
    "empty": lambda new: new(0),
    "no columns": lambda new: new(3, 0),
    "short": lambda new: new(5),
    "short last block": lambda new: new(1001),
    "odd rows": lambda new: new(7, 131),
    "short rows": lambda new: new(50, 7),
    "one row": lambda new: new(1, 300),
    "rows of a block": lambda new: new(4, 128),
    "long rows": lambda new: new(2, 4100),
    "channels_last": lambda new: new(3, 9, 5, 3).contiguous(memory_format=torch.channels_last),
    "transposed": lambda new: new(33, 41).t(),
    "unaligned": lambda new: new(7 * 131 + 1)[1:].view(7, 131),
    "two threads": lambda new: new(130, 257),
}


def values(layout: str, seed: int, dtype: torch.dtype, signed: bool = True) -> Tensor:
    """Values of many magnitudes, with zeros, a block of zeros and, in places, what is not finite."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        flat = x.view(-1)
        flat[24:40] = 0
        for place, value in enumerate(NON_FINITE):
            flat[50 + place :: 170] = value
        return (x if signed else x.abs()).to(dtype)

    return LAYOUTS[layout](new)


def codec_results() -> Iterator[Tensor]:
    ops = torch.ops.memkern
    for layout, dtype, codec, signed, block_size in product(
        LAYOUTS, DTYPES, CODECS.values(), (True, False), BLOCK_SIZES
    ):
        x = values(layout, 1, dtype)
        for step in (None, 7) if codec == CODECS["power"] and not signed else (None,):
            codes, scale = ops.quantize_blockwise(x, codec, signed, block_size, step)
            yield from (codes, scale)
            for out in DTYPES:
                yield ops.dequantize_blockwise(codes, scale, codec, block_size, out)


def states(params: list[Tensor], code: torch.dtype | None, block_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Zero states of the parameters: codes of a dtype with their scales, or fp32 and none."""
    moments = [torch.zeros_like(p, dtype=code or torch.float32) for p in params]
    shapes = [layout_of(p, block_size).scale_shape for p in params] if code else []
    return moments, [torch.zeros(shape) for shape in shapes]


HYPERPARAMETERS = {
    "beta1": [0.9, 0.8],
    "beta2": [0.999, 0.9],
    "eps": [1e-8, 0.0],
    "weight_decay": [0.1, 0.2],
    "decoupled_weight_decay": [1, 0],
    "decoupled_decay": [1, 0],
    "bias_correction": [0, 1],
    "momentum": [0.9, 0.8],
    "dampening": [0.0, 0.1],
    "nesterov": [0, 1],
    "trust_coeff": [0.0, 1e-2],
    "trust_clip": [0, 1],
    "always_adapt": [0, 1],
    "layers": [1, 1],
    "maximize": [0, 1],
}


def step_results(name: str) -> Iterator[Tensor]:
    for param, grad, kind, block_size in product(DTYPES, DTYPES, ("fp32", *CODECS), BLOCK_SIZES):
        if block_size != 128 and (kind == "fp32" or param != grad):
            continue
        params = [values(layout, 2, param) for layout in LAYOUTS]
        lists: dict[str, Any] = HYPERPARAMETERS | {
            "params": params,
            "grads": params,
            "steps": [torch.zeros(()) for _ in params],
            "trust_ratios": [torch.ones(1) for _ in params],
            "group": [i % 2 for i in range(len(params))],
            "lr": [torch.tensor(1e-2, dtype=torch.float64), torch.tensor(3e-3)],
            "codec": [CODECS.get(kind, 0)] * 2,
            "block_size": [block_size] * 2,
        }
        for moment, signed in zip(MOMENTS, STEP_OPS[name].moments.values(), strict=False):
            code = None if kind == "fp32" else torch.int8 if signed else torch.uint8
            lists[f"{moment}s"], lists[f"{moment}_scales"] = states(params, code, block_size)
        if block_size == 24:
            lists |= {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}
        args = pack(name, lists)
        for seed in (3, 4):
            args = args._replace(grads=[values(layout, seed, grad) for layout in LAYOUTS])
            getattr(torch.ops.memkern, name)(*args)
        yield from (*params, *args.moments, *args.scales, *args.steps)


def activation_results() -> Iterator[Tensor]:
    ops = torch.ops.memkern
    for layout, dtype, bits, name in product(LAYOUTS, DTYPES, (1, 2, 3, 4), ("gelu", "mish", "tanh")):
        x, table = values(layout, 5, dtype), LEVELS[name, bits]
        codes = ops.few_bit_encode(x, bits, *table[2:])
        yield codes
        grad = values(layout, 6, dtype)
        yield ops.few_bit_backward(grad, codes, table.levels)
        if bits == 1:
            for output in DTYPES:
                yield ops.few_bit_backward_from_output(
                    grad, values(layout, 7, output), codes, *TWO_BRANCHES["gelu"][1:]
                )


def refused() -> None:
    """Arguments that do not fit together raise before a byte is touched."""
    ops = torch.ops.memkern
    x = torch.randn(7, 131)
    codes, scale = ops.quantize_blockwise(x, 0, True, 128)
    bad: list[Callable[[], object]] = [
        lambda: ops.quantize_blockwise(x[:, :5], 0, True, 128),
        lambda: ops.quantize_blockwise(x, 0, True, 7),
        lambda: ops.quantize_blockwise(x, 9, True, 128),
        lambda: ops.quantize_blockwise(x.double(), 0, True, 128),
        lambda: ops.dequantize_blockwise(codes, scale[:-1], 0, 128, torch.float32),
        lambda: ops.dequantize_blockwise(codes, scale.double(), 0, 128, torch.float32),
        lambda: ops.dequantize_blockwise(codes, scale, 0, 128, torch.float64),
        lambda: ops.few_bit_encode(x[:, :5], *LEVELS["gelu", 3][:1], *LEVELS["gelu", 3][2:]),
        lambda: ops.few_bit_encode(x, 2, [0.0], [4], 0),
        lambda: ops.few_bit_backward(x, torch.zeros(3, 112, dtype=torch.uint8), [0.0] * 8),
        lambda: ops.few_bit_backward(x, torch.zeros(3, 128, dtype=torch.uint8), [0.0] * 4),
    ]
    for grads, moments, scales, group in (
        ([x[:3]], [codes], [scale], [0]),
        ([x], [codes[:3]], [scale], [0]),
        ([x], [codes], [], [0]),
        ([x], [codes], [scale[:2]], [0]),
        ([x], [codes], [scale], [1]),
        ([], [codes], [scale], [0]),
    ):
        lists = guarded.HYPERPARAMETERS | {
            "params": [x], "grads": grads, "exp_avgs": moments, "exp_avg_scales": scales, "group": group,
            "steps": [torch.zeros(())], "lr": [torch.tensor(1.0)], "codec": [0], "block_size": [128],
        }  # fmt: skip
        bad.append(functools.partial(ops.lion_step_, *pack("lion_step_", lists)))
    for call in bad:
        try:
            call()
        except RuntimeError:
            continue
        raise AssertionError("a bad argument was accepted")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN to any NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def check() -> None:
    torch.set_num_threads(2)
    steps = (functools.partial(step_results, name) for name in STEP_OPS)
    for drive in (codec_results, activation_results, *steps):
        first: list[Tensor] = []
        for isa in ISAS:
            os.environ["MEMKERN_CPU_ISA"] = isa
            found = list(drive())
            first = first or found
            assert len(found) == len(first)
            for i, (a, b) in enumerate(zip(found, first, strict=True)):
                assert same_bits(a, b), f"result {i} of {isa} differs from {ISAS[0]}'s"
    for isa in ISAS:
        os.environ["MEMKERN_CPU_ISA"] = isa
        guarded.check(STEP_OPS, most=64, count=12)
    refused()


def check_guards(names: list[str]) -> None:
    """Every size up to 4,096, and more of the patterns."""
    for isa in ISAS:
        os.environ["MEMKERN_CPU_ISA"] = isa
        guarded.check(names or STEP_OPS, most=4096, count=250)


def check_loops() -> None:
    """Training loops of random steps and edits. Inductor would start a compiler with the sanitizers' libraries."""
    from tests.support.run_loops import run_for
    from tests.support.training_exports import ExportedLoop

    class Compiled(ExportedLoop):
        compilers = ("", "", "aot_eager")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    run_for(float(os.environ.get("MEMKERN_FUZZ_SECONDS", "1200")), Compiled)
    assert Compiled.compiled_calls > 0


def overflow(isa: str) -> None:
    os.environ["MEMKERN_CPU_ISA"] = isa
    x = torch.zeros(1024)
    x.untyped_storage().resize_(4 * 960)  # x still claims 1024 elements
    torch.ops.memkern.quantize_blockwise(x, 0, True, 128)


if __name__ == "__main__":
    reason = backend.load_library()
    assert reason is None, reason
    what, *rest = sys.argv[1:] or [""]
    if what == "overflow":
        overflow(rest[0])
    elif what == "guards":
        check_guards(rest)
    else:
        check_loops() if what == "loops" else check()
    print("nothing found")
