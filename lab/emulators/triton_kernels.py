"""Lists every Triton kernel with the constants that it is compiled with, for test_triton_compiled.py.

Variants marked ``everywhere`` are compiled for every target, the others for sm_90 alone: a minute on two cores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import memkern.triton
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import ACTIVATIONS
from memkern.triton import activation, blockwise, grad_norm, muon, trust_ratio
from memkern.triton.launch import TILE, rows_of
from memkern.triton.weights import ERROR8, ERROR16, STOCHASTIC
from tests.support.optimizers import SPECS, OptimizerSpec

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
FP32, BF16, FP16 = range(3)  # in memkern.quant.layout.FLOATS
POWER, DYNAMIC, PLAIN = 1, 2, 0  # kinds of states: power codes, dynamic codes, fp32

# Argument types by name, for all kernels; other arguments are i32 or constants.
TYPES = {
    "table": "*i64",
    "scalars": "*fp32",
    "tables": "*fp32",
    "sums": "*fp64",
    "squares": "*fp64",
    "norm": "*fp64",
    "scales": "*fp32",
    **dict.fromkeys(("lows", "highs"), "*fp32"),
    "zero_points": "*i32",
    **dict.fromkeys(("step_offset", "seed_offset"), "i64"),
    **dict.fromkeys(("numel", "segment", "block", "per_segment", "blocks"), "i64"),
}


class Variant(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    elements: int  # of a tile, on which one program works
    everywhere: bool  # compiled for every target


def tile(kind: int, p: Any, g: Any, block: int = 128, vector: int = 0, flat: bool = True) -> dict[str, Any]:
    """Constants of a kernel on tiles: p and g are dtypes; vector 0 is the widest, 1 is for unaligned tensors."""
    has_fp32 = FP32 in (p, g) or kind == PLAIN
    return {
        "KIND": kind,
        "PARAM_DTYPE": p,
        "GRAD_DTYPE": g,
        "TILES": 8,
        "ROWS": rows_of(block),
        "BLOCK_SIZE": block,
        "VECTOR": vector or (4 if has_fp32 else 8),
        "FLAT": flat,
    }


STEP_TILES = {
    "power, fp32": tile(POWER, FP32, FP32),
    "power, bf16": tile(POWER, BF16, BF16),
    "power, fp16": tile(POWER, FP16, FP16),
    "power, bf16 and fp32": tile(POWER, BF16, FP32),
    "power, fp32, ragged": tile(POWER, FP32, FP32, flat=False),
    "power, bf16, unaligned": tile(POWER, BF16, BF16, vector=1, flat=False),
    "power, fp32, blocks of 8": tile(POWER, FP32, FP32, block=8),
    "power, bf16, blocks of 4096": tile(POWER, BF16, BF16, block=4096),
    "dynamic, fp32": tile(DYNAMIC, FP32, FP32),
    "fp32 states, bf16": tile(PLAIN, BF16, BF16),
    "fp32 states, fp32, unaligned": tile(PLAIN, FP32, FP32, vector=1),
    "power, bf16+8": tile(POWER, ERROR8.value, BF16),
    "power, bf16+16": tile(POWER, ERROR16.value, BF16),
    "power, bf16, stochastic": tile(POWER, STOCHASTIC.value, BF16),
    "fp32 states, bf16+8": tile(PLAIN, ERROR8.value, BF16),
}
EVERYWHERE = {"muon: power, bf16 and fp32"}.union(*(spec.everywhere for spec in SPECS.values()))
# The tiles of all optimizers.
COMMON = ("power, fp32", "power, bf16", "power, fp32, ragged", "dynamic, fp32", "fp32 states, bf16")

GROUPS = {"all": STEP_TILES}  # tiles that OptimizerSpec.triton adds, by the names there


def _steps(name: str, kernel: Any, variants: Any) -> dict[str, Variant]:
    return {
        f"{name}: {variant}": Variant(
            kernel,
            constants,
            {},
            constants["ROWS"] * constants["BLOCK_SIZE"],
            f"{name}: {variant}" in EVERYWHERE,
        )
        for variant, constants in STEP_TILES.items()
        if variant in variants
    }


def _optimizer(spec: OptimizerSpec) -> dict[str, Variant]:
    """The kernels of an optimizer's step: on tiles, for trust ratios also of norms, and its prologue."""
    family, module = spec.family, getattr(memkern.triton, spec.family)
    variants = (*COMMON, *(name for group in spec.triton for name in GROUPS[group]))
    small = ["prologue", *(["ratios"] if spec.op.has_trust_ratios else [])]
    kernels = _steps(family, getattr(module, f"{family}_tiles"), variants)
    if spec.op.has_trust_ratios:
        kernels |= _steps(f"{family} norms", getattr(module, f"{family}_norm_tiles"), variants)
    for name in (f"{family}: {part}" for part in small):
        kernel = getattr(module, name.replace(": ", "_"))
        kernels[name] = Variant(kernel, {}, {}, 0, name in EVERYWHERE)
    return kernels


def _blockwise(name: str, kernel: Any, codec: int, signed: bool, dtype: str, vector: int) -> Variant:
    constants = {
        "KIND": codec,
        "SIGNED": signed,
        "ROWS": rows_of(128),
        "BLOCK": 128,
        "VECTOR": vector,
        "FLAT": vector > 1,
    }
    if name == "quantize":
        constants["DITHERED"] = not signed
    types = {"values": f"*{dtype}", "codes": "*i8" if signed else "*u8"}
    return Variant(kernel, constants, types, 1024, codec == POWER)


def _norm(g: Any, vector: int) -> Variant:
    constants = tile(PLAIN, g, g, vector=vector)
    return Variant(grad_norm.norm_tiles, constants, {}, 1024, vector > 1)


MUON_APPLY = {  # GRAD_DTYPE is that of the update
    "fp32": tile(PLAIN, FP32, BF16),
    "bf16": tile(PLAIN, BF16, BF16, vector=8),
    "bf16+8": tile(PLAIN, ERROR8.value, BF16, vector=8),
}

KERNELS: dict[str, Variant] = {
    **{name: kernel for spec in SPECS.values() for name, kernel in _optimizer(spec).items()},
    # PARAM_DTYPE is that of the update, bf16.
    **_steps(
        "muon",
        muon.muon_tiles,
        ("power, bf16", "power, bf16 and fp32", "power, bf16, unaligned", "fp32 states, bf16"),
    ),
    "muon: prologue": Variant(muon.muon_prologue, {}, {}, 0, True),
    "muon: sums": Variant(muon.norm_of_each, {}, {}, 0, True),
    **{
        f"muon apply: {text}": Variant(muon.muon_apply_tiles, constants, {}, 1024, text == "bf16")
        for text, constants in MUON_APPLY.items()
    },
    "muon apply: prologue": Variant(muon.muon_apply_prologue, {}, {}, 0, True),
    "layers: count of steps": Variant(trust_ratio.increment_steps_of_tensors, {}, {}, 0, True),
    "norm: squares, fp32": _norm(FP32, 4),
    "norm: squares, bf16, unaligned": _norm(BF16, 1),
    "norm: sum": Variant(grad_norm.norm_total, {}, {}, 0, True),
    **{
        f"{name}: {text}": _blockwise(name, kernel, codec, signed, dtype, vector)
        for name, kernel in (
            ("quantize", blockwise.quantize_tiles),
            ("dequantize", blockwise.dequantize_tiles),
        )
        for text, codec, signed, dtype, vector in (
            ("power, signed, fp32", POWER, True, "fp32", 4),
            ("power, unsigned, bf16", POWER, False, "bf16", 8),
            ("dynamic, signed, fp32", DYNAMIC, True, "fp32", 4),
            ("dynamic, unsigned, fp16, unaligned", DYNAMIC, False, "fp16", 1),
        )
    },
}

GELU, TWO_BRANCH = LEVELS["gelu", 3], TWO_BRANCHES["gelu"]
TABLE = {
    "THRESHOLDS": GELU.thresholds,
    "FLIPS": GELU.flips,
    "COUNT": len(GELU.flips),
    "SYMMETRY": GELU.symmetry,
    "BITS": GELU.bits,
}


def _activation(kernel: Any, constants: dict[str, Any], dtype: str, vector: int, everywhere: bool) -> Variant:
    types = dict.fromkeys(("x", "y", "grad", "output", "result"), f"*{dtype}") | {"codes": "*u8"}
    constants = {**constants, "BLOCK": TILE, "VECTOR": vector}
    return Variant(kernel, constants, types, TILE, everywhere)


KERNELS |= {
    **{
        f"few_bit: {name}, {dtype}": _activation(
            activation.encode_vectors,
            {**TABLE, "A": 1.0, "B": 20.0, "FN": fn},
            dtype,
            vector,
            name in ("encode", "gelu_tanh") and vector > 1,
        )
        for name, fn in {"encode": -1, **ACTIVATIONS}.items()
        for dtype, vector in (("bf16", 8), ("fp32", 4), ("fp16", 1))
        if vector == 8 or name == "gelu"
    },
    **{
        f"few_bit: {name}, {dtype}": _activation(kernel, constants, dtype, vector, dtype == "bf16")
        for name, kernel, constants in (
            ("backward", activation.multiply_by_levels, {"LEVELS": GELU.levels, "BITS": 3}),
            (
                "backward from output",
                activation.multiply_by_two_branch,
                {
                    "MINIMUM": TWO_BRANCH.minimum,
                    "FALLING": TWO_BRANCH.falling,
                    "RISING": TWO_BRANCH.rising,
                    "REACH": (TWO_BRANCH.falling_reach, TWO_BRANCH.rising_reach),
                    "SCALE": (2 / TWO_BRANCH.falling_reach, 2 / TWO_BRANCH.rising_reach),
                    "COUNT": len(TWO_BRANCH.rising),
                },
            ),
        )
        for dtype, vector in (("bf16", 8), ("fp32", 4))
    },
}
CASES = [
    (name, target) for target in TARGETS for name, variant in KERNELS.items() if target == "sm_90" or variant.everywhere
]
# sm_89 has slow fp64, unlike sm_80: for kernels that depend on it.
CASES += [(name, "sm_89") for name, v in KERNELS.items() if "SLOW_FP64" in v.kernel.arg_names]
