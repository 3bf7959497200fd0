"""Writes the headers that come from Python's tables. Called by setup.py, and by tests that compile csrc/ themselves.

The tables' files are run and not imported: memkern itself may not be importable where it is built.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CSRC = Path(__file__).parent
CODEC, SCHEMAS = "memkern/quant/codec.py", "memkern/schemas.py"


def _source(path: str) -> Any:
    """The names that a file of Python defines, as attributes."""
    return SimpleNamespace(**runpy.run_path(str(CSRC.parent / path)))


def _header(source: str, *lines: str) -> str:
    """A header's text: the two lines that begin all of them, then ``lines``."""
    return "\n".join((f"// Written by csrc/generate.py from {source}: change it there.", "#pragma once", *lines))


def _array(name: str, values: tuple[float, ...]) -> str:
    lines = [", ".join(f"{float.hex(v)}f" for v in values[i : i + 4]) for i in range(0, len(values), 4)]
    return f"MEMKERN_TABLE float {name}[{len(values)}] = {{\n    " + ",\n    ".join(lines) + "};\n"


def _constants(codec: Any) -> dict[str, int]:
    return {
        "kPower": codec.CODECS["power"],
        "kDynamic": codec.CODECS["dynamic"],
        "kPowerLevelsSigned": codec.POWER_LEVELS_SIGNED,
        "kPowerLevelsUnsigned": codec.POWER_LEVELS_UNSIGNED,
        "kDynamicZeroSigned": codec.dynamic_zero(True),
        "kMinBlockSize": codec.MIN_BLOCK_SIZE,
        "kMaxBlockSize": codec.MAX_BLOCK_SIZE,
        "kDitherShift": codec.DITHER_SHIFT,
        "kWeightDroppedStochastic": codec.WEIGHT_DROPPED_BITS["stochastic"],
        "kWeightDroppedError8": codec.WEIGHT_DROPPED_BITS["bf16+8"],
        "kPlain": codec.PLAIN,
        "kEven": codec.EVEN,
        "kOdd": codec.ODD,
        "kMaxBits": codec.MAX_BITS,
        "kMaxThresholds": codec.MAX_THRESHOLDS,
        "kMaxCoefficients": codec.MAX_COEFFICIENTS,
        "kPlaneAlignment": codec.PLANE_ALIGNMENT,
        "kActivations": len(codec.ACTIVATIONS),
        **{f"k{name.title().replace('_', '')}": number for name, number in codec.ACTIVATIONS.items()},
    }


def tables() -> str:
    """core/tables.h: the codecs' constants and the dynamic map."""
    codec = _source(CODEC)
    arrays = {
        f"kDynamic{kind}{'Signed' if signed else 'Unsigned'}": make(signed)
        for kind, make in (("Map", codec.dynamic_map), ("Midpoints", codec.dynamic_midpoints))
        for signed in (True, False)
    }
    return _header(
        CODEC,
        "#include <cstdint>",
        "",
        "#ifdef __CUDACC__",
        "#define MEMKERN_TABLE static __device__ const",
        "#else",
        "#define MEMKERN_TABLE inline constexpr",
        "#endif",
        "",
        "namespace memkern {",
        *(f"constexpr int {name} = {value};" for name, value in _constants(codec).items()),
        f"constexpr uint32_t kDitherJ = {codec.DITHER_J}u, kDitherStep = {codec.DITHER_STEP}u;",
        f"constexpr uint32_t kWeightJ = {codec.WEIGHT_J}u, kWeightStep = {codec.WEIGHT_STEP}u;",
        f"constexpr float kDitherClamp = {float.hex(codec.DITHER_CLAMP)}f;",
        f"constexpr float kLargestMarkedScale = {float.hex(codec.LARGEST_MARKED_SCALE)}f;",
        f"constexpr double kLeastNorm = {float.hex(codec.LEAST_NORM)};",
        "",
        *(_array(name, values) for name, values in arrays.items()),
        "}  // namespace memkern",
        "",
    )


def _title(op: Any) -> str:
    return op.name.removesuffix("_step_").title()


def hyperparameters() -> str:
    """core/hyperparameters.h: a struct per optimizer, laid out as a group's floats are."""
    schemas = _source(SCHEMAS)
    structs = [
        f"struct {_title(op)}Hyperparameters {{\n  double {', '.join(op.hyperparameters)};\n}};\n"
        for op in (*schemas.STEP_OPS.values(), schemas.MUON_STEP)
    ]
    return _header(SCHEMAS, "", "namespace memkern {", "", *structs, "}  // namespace memkern\n")


def _step_op(op: Any) -> str:
    def cpp_bool(value: bool) -> str:
        return str(value).lower()

    moments = ", ".join(f'{{"{name}", {cpp_bool(signed)}}}' for name, signed in op.moments.items())
    flags = cpp_bool(op.has_trust_ratios)
    return f'constexpr StepOp k{_title(op)}Step{{"{op.name}", {len(op.moments)}, {{{moments}}}, {flags}}};'


def schemas() -> str:
    """common/schemas.h: the ops' schemas, and the table of the optimizers' steps."""
    python = _source(SCHEMAS)
    steps = python.STEP_OPS
    return _header(
        SCHEMAS,
        "",
        "namespace memkern {",
        "",
        "inline constexpr const char* kSchemas[] = {",
        *(f'    "{name}{schema}",' for name, schema in python.SCHEMAS.items()),
        "};",
        f"constexpr int kStepArguments = {len(python.StepArgs._fields)};",
        f"constexpr int kMaxMoments = {max(len(op.moments) for op in steps.values())};",
        "",
        "// What is specific to one optimizer's step.",
        "struct StepOp {",
        "  struct Moment {",
        "    const char* name;",
        "    bool is_signed;  // stored as int8 codes, else uint8",
        "  };",
        "  const char* name;",
        "  int moments;",
        "  Moment moment[kMaxMoments];",
        "  bool has_trust_ratios;",
        "};",
        *map(_step_op, (*steps.values(), python.MUON_STEP)),
        "",
        "// Calls DO(name, ...) for each of them.",
        "#define MEMKERN_FOR_STEPS(DO, ...) \\",
        "  " + " ".join(f"DO({name.removesuffix('_')}, __VA_ARGS__)" for name in steps),
        "",
        "}  // namespace memkern",
        "",
    )


HEADERS = {"core/tables.h": tables, "core/hyperparameters.h": hyperparameters, "common/schemas.h": schemas}


def write_headers(folder: Path = CSRC) -> None:
    """Writes the headers whose text has changed, so that only what includes these is compiled anew."""
    for name, make_text in HEADERS.items():
        text = make_text()
        header = folder / name
        if not header.exists() or header.read_text() != text:
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)


if __name__ == "__main__":
    write_headers()
