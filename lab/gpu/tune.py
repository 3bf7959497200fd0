"""`make gpu PART=tune`: other sizes of tiles and thread blocks than those in csrc/cuda/tile.cuh, built and timed.

CUDA: each setting is a list of macros, built into a library of its own in build/gpu/tune with nothing but the ops that
it is about, all settings in parallel; then each is timed in a process of its own. There are no pipeline stages to
vary: Adam's and LAMB's kernels load one vector ahead, in registers, and the others none. More bytes in flight take
more thread blocks on a multiprocessor, which leaves a thread fewer registers. Triton: the same for TILE, TILES, STAGES
and the options of launches, without a build.

A line of JSON for each build and each time (as in headline.py, "copy_share" is the share of the copy rate of the same
minute), then one for each case with the best setting. The defaults are timed first and last: what differs between these
two is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.emulators import cuda_kernels

from .parts import has, tool
from .runner import ROOT
from .settings import DEFAULT, SETTINGS, SOURCES, TIMED, Setting

FOLDER = ROOT / "build" / "gpu" / "tune"
SECONDS = 500.0  # for everything
BUILDS = 0.5  # the share of SECONDS that builds may take
LEAST = 15.0  # kept for the times of one setting, and for the table at the end


OPTIMIZERS = ("AdamW8bit", "Lion8bit", "LAMB8bit", "LARS8bit")
CODES = {"codes": "memkern power codes", "values": "memkern values of power codes"}
BACKENDS = {"steps": "cuda", "codes": "cuda", "triton": "triton"}
DTYPES = ("bf16", "fp32")
SIZES = (28, 22, 23, 24, 25)  # powers of two

REGISTER = {
    "steps": """
  MEMKERN_REGISTER_STEP(adam_step, m, cuda);
  MEMKERN_REGISTER_STEP(lion_step, m, cuda);
  MEMKERN_REGISTER_STEP(lamb_step, m, cuda);
  MEMKERN_REGISTER_STEP(lars_step, m, cuda);
""",
    "codes": """
  m.impl("quantize_blockwise", TORCH_BOX(&memkern::quantize_blockwise_cuda));
  m.impl("dequantize_blockwise", TORCH_BOX(&memkern::dequantize_blockwise_cuda));
""",
    "gelu": """
  m.impl("few_bit_encode", TORCH_BOX(&memkern::few_bit_encode_cuda));
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
  m.impl("few_bit_backward", TORCH_BOX(&memkern::few_bit_backward_cuda));
""",
}


def say(row: dict[str, Any]) -> None:
    """A line of JSON, in one piece: threads print too."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


# ---- builds


def folder_of(setting: Setting) -> Path:
    return FOLDER / f"{setting.kind} {setting.name}".replace(" ", "-").replace("^", "")


def unit_of(setting: Setting) -> str:
    """A library's source: kernels, and the registration of their ops alone."""
    files = [ROOT / "csrc" / "cuda" / f"{name}.cu" for name in SOURCES[setting.kind]]
    includes = "".join(f'#include "{file}"\n' for file in files)
    return f"""{includes}#include "common/ops.h"
STABLE_TORCH_LIBRARY(memkern, m) {{
  for (const char* schema : memkern::kSchemas) m.def(schema);
}}
STABLE_TORCH_LIBRARY_IMPL(memkern, CUDA, m) {{{REGISTER[setting.kind]}}}
"""


def command(setting: Setting, arch: str, folder: Path) -> list[str]:
    """setup.py's flags, in one step to a library."""
    import torch

    home = Path(torch.__file__).parent
    return [
        *(str(tool("nvcc")), *cuda_kernels.FLAGS, f"-arch=sm_{arch.replace('.', '')}"),
        *("-Xcompiler=-fPIC,-fvisibility=hidden", "-shared"),
        *(f"-DMEMKERN_{name}={value}" for name, value in setting.values.items()),
        *cuda_kernels.includes(FOLDER),
        *(str(folder / "unit.cu"), "-o", str(folder / "libmemkern.so")),
        *(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"),
        "-Xlinker=--push-state,--no-as-needed,-ltorch,--pop-state",
    ]


def build(setting: Setting, arch: str, seconds: float) -> dict[str, Any]:
    """Builds the library in the setting's folder; returns its time, registers and spills, or what failed."""
    folder, start = folder_of(setting), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "unit.cu").write_text(unit_of(setting))
    row: dict[str, Any] = {"kind": setting.kind, "setting": setting.name, **setting.values}
    try:
        done = subprocess.run(
            command(setting, arch, folder), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return row | {"failed": f"nvcc took longer than {seconds:.0f} s"}
    except OSError as error:
        return row | {"failed": str(error)}
    (folder / "nvcc.log").write_text(done.stdout + done.stderr)
    row["build_s"] = round(time.monotonic() - start, 1)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        return row | {"failed": (lines or [f"nvcc: exit code {done.returncode}"])[0][:300]}
    used = cuda_kernels.usage(done.stderr)
    row["registers"] = {kernel: used[kernel]["registers"] for kernel in TIMED[setting.kind] if kernel in used}
    if spilled := {kernel: numbers["spilled"] for kernel, numbers in used.items() if numbers["spilled"]}:
        row["spilled"] = spilled
    return row


# ---- times


def set_triton(values: dict[str, int]) -> None:
    """Constants of memkern.triton.launch, wherever they were imported."""
    import memkern.triton.launch as launch

    options = {name: value for name, value in values.items() if name.startswith("num_")}
    launch.OPTIONS.update(options)
    for name, value in values.items():
        if name in options:
            continue
        getattr(launch, name)  # raises where there is none
        for module in [m for n, m in sys.modules.items() if n.startswith("memkern.triton.") and hasattr(m, name)]:
            setattr(module, name, value)


def cases(kind: str, device: str, sizes: tuple[int, ...] = SIZES) -> Iterator[Any]:
    """What a setting is timed on, as cases of benchmarks.harness."""
    from benchmarks.bench_lamb import CLASSIC_NORMS, NORMS, NOTHING, RECIPE
    from benchmarks.bench_optim import of, stepper
    from benchmarks.harness import Case

    from .headline import DTYPES as types
    from .headline import saved

    for size in sizes:
        for dtype in DTYPES:
            if kind in ("steps", "triton"):
                for name in OPTIMIZERS:
                    reads = {"LAMB8bit": NORMS, "LARS8bit": CLASSIC_NORMS}.get(name, NOTHING)
                    shapes = [(2**size // 4096, 4096)]
                    make = of("memkern.optim", name, **(RECIPE if name == "LARS8bit" else {}))
                    step = stepper(f"memkern {name}", make, shapes, device, types[dtype], reads)
                    yield Case(f"{name}, {dtype}, 2^{size}", 2**size, [step])
            if kind == "codes":
                found = {contender.name: contender for contender in saved(2**size, dtype, device).contenders}
                for way, name in CODES.items():
                    yield Case(f"{way}, {dtype}, 2^{size}", 2**size, [found[name]])
            if kind in ("gelu", "triton"):
                for way in ("forward", "backward"):
                    contender = gelu(way, 2**size, types[dtype], kind, device)
                    yield Case(f"GELU {way}, {dtype}, 2^{size}", 2**size, [contender])


def gelu(way: str, numel: int, dtype: Any, kind: str, device: str) -> Any:
    """The op alone, without autograd."""
    import torch

    from benchmarks.harness import Contender, Subject
    from memkern.fewbit.tables import LEVELS
    from memkern.quant.codec import ACTIVATIONS

    bits, levels, thresholds, flips, symmetry = LEVELS["gelu", 3]

    def setup() -> Subject:
        if kind == "triton":
            import memkern.triton as ops
        else:
            ops = torch.ops.memkern
        x = torch.randn(numel, device=device).to(dtype)
        codes = ops.few_bit_encode(x, bits, thresholds, flips, symmetry)
        moved = 2 * x.nbytes + codes.nbytes
        call: Callable[[], object] = (
            (lambda: ops.few_bit_forward(x, ACTIVATIONS["gelu"], 0.0, 0.0, bits, thresholds, flips, symmetry))
            if way == "forward"
            else (lambda: ops.few_bit_backward(x, codes, levels))
        )
        return Subject(call, lambda: moved)

    return Contender("memkern GELU", setup)


def measure(setting: Setting, device: str, sizes: tuple[int, ...], warm: bool) -> None:
    """Times a setting on all cases: a line of JSON each. In a process of its own."""
    library = folder_of(setting) / "libmemkern.so"
    if setting.kind != "triton":
        from memkern import backend

        backend.LIBRARY = library  # before memkern._ops loads it
        import memkern._ops
    from benchmarks import harness

    if setting.kind == "triton":
        import memkern.triton  # noqa: F401  (all of its modules)

        set_triton(setting.values)
    clock = None if warm else harness.Clock(device)
    for case in cases(setting.kind, device, sizes):
        with used_backend(setting.kind):
            if clock is None:
                case.contenders[0].setup().step()
                continue
            result = harness.measure(case, clock, rounds=15, seconds=0.3)[0]
        row = {
            "kind": setting.kind,
            "setting": setting.name,
            "case": case.name,
            "ms": result.ms_median,
            "ms_p20": result.ms_p20,
            "ms_p80": result.ms_p80,
            "copy_share": result.copy_share,
            "copy_rate_gbps": result.copy_rate_gbps,
            "note": result.note,
        }
        say({k: v for k, v in row.items() if v not in (None, "")})


def used_backend(kind: str) -> Any:
    import memkern

    return memkern.use_backend(BACKENDS[kind]) if kind in BACKENDS else contextlib.nullcontext()


# ---- the sweep


def timed(setting: Setting, seconds: float, *more: str) -> list[dict[str, Any]]:
    """The rows of a setting's process, printed as they come; it is ended after `seconds`."""
    place = str(SETTINGS.index(setting))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "lab.gpu.tune", "--measure", place, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    rows, last = [], ""
    for line in process.stdout or ():
        if line.startswith("{"):
            print(line, end="", flush=True)
            rows.append(json.loads(line))
        elif line.strip():
            last = line.strip()
    code = process.wait()
    timer.cancel()
    if code:
        failed = {"kind": setting.kind, "setting": setting.name, "failed": f"exit code {code}: {last[:300]}"}
        say(failed)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: the best setting by its share of the copy rate, and what the default loses against it."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row.get("copy_share"):
            settings = found.setdefault((row["kind"], row["case"]), {})
            settings.setdefault(row["setting"], []).append(row["copy_share"])
    result = []
    for (kind, case), settings in found.items():
        if DEFAULT not in settings:
            continue
        runs = settings[DEFAULT]
        default = sum(runs) / len(runs)
        means = {name: sum(shares) / len(shares) for name, shares in settings.items()}
        best = max(means, key=lambda name: means[name])
        result.append(
            {
                "kind": kind,
                "case": case,
                "best": best,
                "best_share": round(means[best], 4),
                "default_share": round(default, 4),
                "default_loses_percent": round(100 * (means[best] / default - 1), 1),
                "noise_percent": round(100 * (max(runs) / min(runs) - 1), 1),
            }
        )
    return result


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    line = "{:7} {:28} {:24} {:>6} {:>8} {:>7} {:>7}"
    yield line.format("kind", "case", "best", "share", "default", "loses", "noise")
    for row in found:
        loses, noise = f"{row['default_loses_percent']} %", f"{row['noise_percent']} %"
        shares = f"{row['best_share']:.3f}", f"{row['default_share']:.3f}"
        yield line.format(row["kind"], row["case"], row["best"], *shares, loses, noise)


def plan(settings: list[Setting]) -> None:
    for setting in settings:
        macros = " ".join(f"{name}={value}" for name, value in setting.values.items())
        print(f"would time {setting.kind}, {setting.name} {macros}".rstrip())
        if setting.kind in SOURCES:
            print(f"  after building {', '.join(SOURCES[setting.kind])} in {folder_of(setting)}")
    for kind in dict.fromkeys(setting.kind for setting in settings):
        print(f"on {kind}: {'; '.join(case.name for case in cases(kind, 'cpu'))}")


def with_defaults_again(settings: list[Setting]) -> list[Setting]:
    """Those for CUDA, then Triton's, each followed by its defaults."""
    found = []
    for triton in (False, True):
        some = [setting for setting in settings if (setting.kind == "triton") == triton]
        found += [*some, *(setting for setting in some if setting.name == DEFAULT)]
    return found


def sweep(settings: list[Setting], arch: str, seconds: float, more: list[str]) -> int:
    end = time.monotonic() + seconds
    failed: list[Setting] = []
    cuda_kernels.write_headers(FOLDER)

    def prepare(setting: Setting) -> None:
        if setting.kind == "triton":  # compiles into Triton's cache
            timed(setting, BUILDS * seconds, "--warm", *more)
            return
        row = build(setting, arch, BUILDS * seconds)
        say(row)
        if "failed" in row:
            failed.append(setting)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # nothing is timed while they run
        list(pool.map(prepare, settings))
    rows = []
    for setting in with_defaults_again(settings):
        left = end - time.monotonic()
        if setting not in failed and left < 2 * LEAST:
            say({"kind": setting.kind, "setting": setting.name, "failed": "the time is up"})
        elif setting not in failed:
            rows += timed(setting, left - LEAST, *more)
    found = verdicts(rows)
    for row in found:
        say(row)
    print("\n".join(table(found)), flush=True)
    return int(bool(failed) or not found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="says what it would do")
    parser.add_argument("--arch", default="9.0", help="the GPU's compute capability")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--kind", action="append", choices=[*SOURCES, "triton"], help="these alone")
    parser.add_argument("--size", type=int, action="append", help="powers of two, in place of all")
    parser.add_argument("--small", action="store_true", help="tensors of 65,536 elements: a test of this script")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = (16,) if args.small or args.warm else tuple(args.size or SIZES)
    if args.measure is not None:
        measure(SETTINGS[args.measure], args.device, sizes, args.warm)
        return 0
    possible = {**dict.fromkeys(SOURCES, tool("nvcc")), "triton": has("triton") or None}
    kinds = [kind for kind, found in possible.items() if found and kind in (args.kind or possible)]
    settings = [setting for setting in SETTINGS if setting.kind in kinds]
    if args.plan:
        plan(settings)
        return 0
    more = ["--small"] if args.small else [f"--size={size}" for size in args.size or ()]
    return sweep(settings, args.arch, args.seconds, more)


if __name__ == "__main__":
    sys.exit(main())
