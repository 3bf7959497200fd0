"""The share of a card's copy bandwidth that each CUDA kernel can reach, from counts.

Not a measurement: something to hold measurements against, and to look ahead from one card to another. A kernel that
moves B bytes and issues I instructions per element takes at least the longest of ::

    t_memory = B / copy bandwidth
    t_issue  = I / (0.85 * multiprocessors * 128 * clock)
    t_pipe   = (those of I that a pipe executes) / (0.85 * multiprocessors * lanes of the pipe * clock)
    t_words  = (words of shared memory and first-level cache) / (0.85 * multiprocessors * 32 * clock)
    t_fp64   = (those of I that are fp64) / (multiprocessors * FP64 * clock)

128 lanes of a multiprocessor issue an instruction per cycle; 0.85 is what loops with few stalls reach. The pipes have
fewer lanes (PIPES): ALUs half, special functions and conversions an eighth. Words of gathers from tables count as often
as bank conflicts repeat them (CONFLICTS).

The share has a range: what is loaded ahead must cover the memory's latency (:func:`range_of_share`), 1.5 to 1.9
microseconds under load, and 0.75 to 0.9 of the slots are issued. The starts of tiles and the
end of a grid are in a table of steps of 2^22 to 2^30 elements (``time_of_step``). Left out: the filling of tables, and
instructions that wait for each other.

Instructions are those of the main paths, from lab/results/cuda-kernels.json, counted in the machine code of each
architecture.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
from typing import Any, NamedTuple

import benchmarks
from lab import RESULTS

COUNTS = RESULTS / "cuda-kernels.json"
ISSUED = 0.85  # of the slots
LANES = 128
# Lanes of a multiprocessor (CUDA C++ Programming Guide, Throughput of Native Arithmetic Instructions): fp32 products
# and sums; integers, comparisons, selections and bytes; roots, reciprocals and conversions; words of 32 bits.
PIPES: dict[str, dict[str, float]] = {
    arch: {"fma": 64 if arch == "sm_80" else 128, "alu": 64, "xu": 16, "words": 32}
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
}
# How often a word that lanes gather from a table in shared memory is read, for values from N(0, 1): the results of bf16
# values, pairs of levels (simulated in lab/tests/test_gpu_model.py).
CONFLICTS = {
    "GELU 3-bit forward bf16": 3.5,
    **dict.fromkeys(("GELU 3-bit backward bf16", "GELU 3-bit backward fp32"), 2.6),
}
# fp64 instructions a cycle of a multiprocessor: of conversions 16 (sm_80, 90 and 100) or 2, of sums and products 32, 64
# or 2; kernels have as many of the one kind as of the other.
FP64 = {
    **{"sm_80": 2 / (1 / 16 + 1 / 32), "sm_89": 2.0, "sm_120": 2.0},
    **dict.fromkeys(("sm_90", "sm_100"), 2 / (1 / 16 + 1 / 64)),
}
# As csrc/cuda/tile.cuh has them.
THREADS, VECTOR, TILE_ELEMENTS, AHEAD_BLOCKS, STEP_BLOCKS = 64, 8, 2**14, 8, 10
# Seconds from a load to its use with the memory busy: of a range in which all kernels for bf16 come out as they were
# measured on an H200 (MEASURED; 0.6 to 1.0 was assumed before). Cycles from one instruction of a warp to its next when
# few other warps run: assumed.
LATENCY = 1.5e-6
LATENCIES, ISSUED_RANGE = (1.9e-6, 1.5e-6), (0.75, 0.9)  # the low end of the range, and the high one
CYCLES = 2


class Card(NamedTuple):
    """Multiprocessors, boost clock in GHz and memory bandwidth in GB/s as the vendor's data sheets have them; a copy
    reaches about 0.9 of the latter. H100 and H200 ran at 1.98 GHz when they were seen under load."""

    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float

    @property
    def copy(self) -> float:
        return 0.9 * self.bandwidth


CARDS = {
    "A100 80 GB": Card("sm_80", 108, 1.41, 2039),
    "RTX 4090": Card("sm_89", 128, 2.52, 1008),
    "H100 SXM": Card("sm_90", 132, 1.98, 3350),
    "H200": Card("sm_90", 132, 1.98, 4800),
    "B200": Card("sm_100", 148, 1.965, 8000),
    "RTX 5090": Card("sm_120", 170, 2.41, 1792),
}
# Read and written per element: gradient, parameter twice, two codes twice, two scales of blocks of 128 twice.
SCALES = 2 * 2 * 4 / 128
BYTES = {
    "AdamW fp32": 4 + 8 + 4 + SCALES,
    "AdamW bf16": 2 + 4 + 4 + SCALES,
    "AdamW bf16+8": 2 + 4 + 4 + 2 + SCALES,
    "AdamW bf16+16": 2 + 4 + 4 + 4 + SCALES,
    "LAMB norms fp32": 4 + 4 + 2 + SCALES / 2,
    "LAMB norms bf16": 2 + 2 + 2 + SCALES / 2,
    "LAMB bf16": 2 + 4 + 4 + SCALES,
    "Lion fp32": 4 + 8 + 2 + SCALES / 2,
    "Lion bf16": 2 + 4 + 2 + SCALES / 2,
    "LARS norms fp32": 4 + 4 + 1 + SCALES / 4,
    "LARS norms bf16": 2 + 2 + 1 + SCALES / 4,
    "LARS fp32": 4 + 8 + 2 + SCALES / 2,
    "LARS bf16": 2 + 4 + 2 + SCALES / 2,
    "grad norm fp32": 4,
    "grad norm bf16": 2,
    "Muon momentum fp32": 4 + 2 + 2 + SCALES / 2,  # gradient, update in bf16, codes twice
    "Muon momentum bf16": 2 + 2 + 2 + SCALES / 2,
    "Muon apply fp32": 8 + 2,
    "Muon apply bf16": 4 + 2,
    "power codes fp32": 5 + 4 / 128,
    "power codes bf16": 3 + 4 / 128,
    "power values fp32": 5 + 4 / 128,
    "power values bf16": 3 + 4 / 128,
    "GELU 3-bit forward bf16": 4 + 3 / 8,
    "GELU 3-bit forward fp32": 8 + 3 / 8,
    "GELU 3-bit backward bf16": 4 + 3 / 8,
    "GELU 3-bit backward fp32": 8 + 3 / 8,
}
# The kernel of a step's path, as the record names it.
KERNELS = {
    "AdamW fp32": "adam_tiles<1, 0>",
    "AdamW bf16": "adam_tiles<1, 0>",
    "Lion fp32": "lion_tiles<1, 0>",
    "Lion bf16": "lion_tiles<1, 0>",
    "LAMB norms fp32": "lamb_norm_tiles<1, 0>",
    "LAMB norms bf16": "lamb_norm_tiles<1, 0>",
    "LAMB bf16": "lamb_tiles<1, 0>",
}
# The same of those that are not steps.
OTHERS = {
    "LARS norms fp32": "lars_norm_tiles<1, 0>",
    "LARS norms bf16": "lars_norm_tiles<1, 0>",
    "LARS fp32": "lars_tiles<1, 0>",
    "LARS bf16": "lars_tiles<1, 0>",
    "Muon momentum fp32": "muon_tiles<1>",
    "Muon momentum bf16": "muon_tiles<1>",
    "grad norm fp32": "norm_tiles",
    "grad norm bf16": "norm_tiles",
    "power codes fp32": "quantize_whole<0, 1>",
    "power codes bf16": "quantize_whole<1, 1>",
}
# Bytes per element that are written, of those in BYTES. The others are loaded one vector ahead
# (csrc/cuda/whole_blocks.cuh), two vectors in norms of gradients.
WRITTEN = {
    **{path: (4 if "fp32" in path else 2) + 2 + SCALES / 2 for path in ("AdamW fp32", "AdamW bf16", "LAMB bf16")},
    **{f"{name} fp32": 5 + SCALES / 4 for name in ("Lion", "LARS")},
    **{f"{name} bf16": 3 + SCALES / 4 for name in ("Lion", "LARS")},
    **{f"{name} {dtype}": 0 for name in ("LAMB norms", "LARS norms", "grad norm") for dtype in ("fp32", "bf16")},
    **{"power codes fp32": 1 + 4 / 128, "power codes bf16": 1 + 4 / 128},
    **{f"Muon momentum {dtype}": 3 + SCALES / 4 for dtype in ("fp32", "bf16")},
}
# Those whose vectors are copied to shared memory (kCanCopy), so many turns ahead, or one where that is 100 KB
# (csrc/cuda/tile.cuh).
COPIED = (
    *("AdamW bf16", "LAMB norms bf16", "LAMB bf16"),
    *("Lion bf16", "LARS norms bf16", "LARS bf16", "Muon momentum bf16"),
)
COPIES_AHEAD, SMALL_SHARED_MEMORY = 3, ("sm_86", "sm_89", "sm_120")
MIDDLE, LARGE = (2**22, 2**23, 2**24, 2**25), (2**28, 2**30)


@functools.cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(COUNTS.read_text())
    return found


def instructions(kernel: str, arch: str) -> float:
    """Per element, on the main path. One warp in sixteen has a code in doubt, and takes its formula for one element."""
    counts: dict[str, dict[str, float]] = record()["instructions per element"]
    return counts[kernel][arch]


def fp64_instructions(kernel: str, arch: str) -> float:
    counts: dict[str, dict[str, float]] = record()["fp64 instructions per element"]
    return counts.get(kernel, {}).get(arch, 0.0)


def pipes(kernel: str, arch: str) -> dict[str, float]:
    """What each pipe does per element on the main path, with repeated words of gathers."""
    found: dict[str, float] = dict(record()["pipes per element"][kernel][arch])
    shared = found.pop("shared words")
    found["words"] += (CONFLICTS.get(kernel, 1.0) - 1) * shared
    return found


def bytes_in_flight(card: Card, path: str) -> float:
    """Bytes that the threads of a multiprocessor load ahead."""
    registers = record()["registers"][(KERNELS | OTHERS)[path]][card.arch]
    if path in COPIED:
        vectors = 1 if card.arch in SMALL_SHARED_MEMORY else COPIES_AHEAD
    else:
        vectors = 2 if "grad norm" in path else 1
    threads = THREADS * resident_blocks(card.arch, registers)
    return threads * VECTOR * vectors * (BYTES[path] - WRITTEN[path])


def range_of_share(card: Card, path: str) -> tuple[float, float]:
    """The lowest share of the copy bandwidth (longer latency, fewer instructions issued), and the highest."""
    ends = []
    for latency, issued in zip(LATENCIES, ISSUED_RANGE, strict=True):
        loaded = card.multiprocessors * bytes_in_flight(card, path) / latency  # bytes per second
        wanted = card.copy * 1e9 * (BYTES[path] - WRITTEN[path]) / BYTES[path]
        ends.append(min(share_of(card, path, issued), loaded / wanted))
    return ends[0], ends[1]


def share_of(card: Card, kernel: str, issued: float = ISSUED) -> float:
    return share_of_copy(
        card,
        BYTES[kernel],
        instructions(kernel, card.arch),
        fp64_instructions(kernel, card.arch),
        pipes(kernel, card.arch),
        issued,
    )


def share_of_copy(
    card: Card,
    size: float,
    instructions: float,
    fp64: float = 0.0,
    of_pipes: dict[str, float] | None = None,
    issued: float = ISSUED,
) -> float:
    """Of the copy bandwidth, 1 where memory limits."""
    cycles = card.multiprocessors * card.clock * 1e9  # of all, in a second
    memory = size / (card.copy * 1e9)
    lanes = PIPES[card.arch]
    slots = max(instructions / LANES, *(n / lanes[pipe] for pipe, n in (of_pipes or {}).items()), 0.0)
    return min(1.0, memory / max(slots / (issued * cycles), fp64 / (FP64[card.arch] * cycles)))


def limit(card: Card, kernel: str) -> str:
    """What takes the longest: memory, issue, or a pipe."""
    cycles = card.multiprocessors * card.clock * 1e9
    lanes = PIPES[card.arch]
    times = {
        "memory": BYTES[kernel] / (card.copy * 1e9),
        "issue": instructions(kernel, card.arch) / (ISSUED * LANES * cycles),
        "fp64": fp64_instructions(kernel, card.arch) / (FP64[card.arch] * cycles),
        **{pipe: n / (ISSUED * lanes[pipe] * cycles) for pipe, n in pipes(kernel, card.arch).items()},
    }
    return max(times, key=lambda what: times[what])


def shares() -> dict[str, dict[str, float]]:
    """kernel -> card -> share."""
    return {kernel: {name: share_of(card, kernel) for name, card in CARDS.items()} for kernel in BYTES}


MEASURED = {
    f"{kernel} {dtype}{ending}": (f"{case}, {dtype}", contender)
    for kernel, ending, case, contender in (
        ("AdamW", "", "AdamW8bit, one tensor", "memkern AdamW8bit"),
        ("Lion", "", "Lion8bit, one tensor", "memkern Lion8bit"),
        ("grad norm", "", "grad norm, 1 tensors", "memkern grad norm"),
        ("power codes", "", "saved tensors", "memkern power codes"),
    )
    for dtype in ("fp32", "bf16")
}
"""Kernels that a case of lab/gpu/headline.py consists of: the case and the contender. Steps were measured before
their scales came in batches (an eighth more instructions in bf16)."""


def measured() -> dict[str, float]:
    """The share of an H200's copy bandwidth that a kernel reached."""
    with (benchmarks.RESULTS / "headline_nvidia-h200.csv").open(newline="") as file:
        found = {(row["case"], row["contender"]): row["copy_share"] for row in csv.DictReader(file)}
    return {path: float(found[of]) for path, of in MEASURED.items()}


def rows_for_docs() -> list[str]:
    """The table of docs/gpu-checks.md: instructions, what is in flight, the share's range and measurement."""
    reached = measured()
    counts: dict[str, dict[str, float]] = record()["instructions per element"]
    rows = []
    for path in KERNELS | OTHERS:
        flying = bytes_in_flight(CARDS["H200"], path) / 1e3
        ranges = (range_of_share(CARDS[card], path) for card in ("H200", "B200"))
        h200, b200 = (f"{low:.2f} to {high:.2f}" for low, high in ranges)
        tenths = math.floor(10 * counts[path]["sm_90"] + 0.5) / 10  # counts are eighths
        share = f"{reached[path]:.2f}" if path in reached else ""
        rows.append(f"| {path} | {tenths} | {flying:.0f} | {h200} | {share} | {b200} |")
    return rows


# ---- tensors of middle size


def resident_blocks(arch: str, registers: int) -> int:
    """Thread blocks of THREADS that a multiprocessor, with its 65,536 registers, runs at once."""
    threads = 2048 if arch in ("sm_80", "sm_90", "sm_100") else 1536
    return min(65536 // (math.ceil(registers / 8) * 8 * THREADS), threads // THREADS)  # given by eights


def tile_elements(numel: int, slots: int) -> int:
    """csrc/cuda/tile.cuh has the same."""
    turn = THREADS * VECTOR
    tiles = slots * math.ceil(numel / (slots * TILE_ELEMENTS))
    return turn * math.ceil(numel / (tiles * turn))


def time_of_step(card: Card, path: str, numel: int, tile: int) -> float:
    """Seconds of one kernel over a tensor, in tiles of so many elements.

    The multiprocessor with the most tiles works on as many at once as there is room for, then on the next. These take
    the time of their bytes and instructions, but no less than one alone takes, which waits for its loads::

        3 * LATENCY + turns * max(LATENCY, (instructions of a turn) * CYCLES / clock)

    with one turn for every THREADS * VECTOR elements, as loads are a turn ahead; 3: for the step's table, twice, and
    the first load.
    """
    per_element = instructions(path, card.arch)
    room = resident_blocks(card.arch, record()["registers"][KERNELS[path]][card.arch])
    memory = tile * BYTES[path] * card.multiprocessors / (card.copy * 1e9)
    lanes = PIPES[card.arch]
    slots = max(per_element / LANES, *(n / lanes[pipe] for pipe, n in pipes(path, card.arch).items()))
    issue = tile * slots / (ISSUED * card.clock * 1e9)
    turns = tile / (THREADS * VECTOR)
    computing = VECTOR * per_element * CYCLES / (card.clock * 1e9)
    alone = 3 * LATENCY + turns * max(LATENCY, computing)
    tiles = math.ceil(math.ceil(numel / tile) / card.multiprocessors)
    full, last = divmod(tiles, room)
    each = max(memory, issue)
    return full * max(room * each, alone) + (max(last * each, alone) if last else 0.0)


def middle_shares(card: Card, path: str) -> dict[int, tuple[float, float]]:
    """Elements -> the share of the copy bandwidth in tiles of TILE_ELEMENTS, and in those of :func:`tile_elements`."""

    def share(numel: int, tile: int) -> float:
        return numel * BYTES[path] / (card.copy * 1e9) / time_of_step(card, path, numel, tile)

    slots = (STEP_BLOCKS if path.startswith(("Lion", "LARS")) else AHEAD_BLOCKS) * card.multiprocessors
    return {n: (share(n, TILE_ELEMENTS), share(n, tile_elements(n, slots))) for n in MIDDLE + LARGE}


def main() -> None:
    argparse.ArgumentParser(prog="python -m lab.studies.gpu_model", description=__doc__.splitlines()[0]).parse_args()
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "bytes per element", *CARDS, title="Share of the copy bandwidth, modelled, and what limits")
    for kernel, row in shares().items():
        cells = (f"{share:.2f} {limit(CARDS[name], kernel)}" for name, share in row.items())
        table.add_row(kernel, f"{BYTES[kernel]:.2f}", *cells)
    Console(width=120).print(table)
    table = Table("kernel", "kB in flight on an H200", *CARDS, title="The same with latencies and a range, modelled")
    for path in KERNELS | OTHERS:
        ranges = (range_of_share(card, path) for card in CARDS.values())
        flying = bytes_in_flight(CARDS["H200"], path) / 1e3
        table.add_row(path, f"{flying:.0f}", *(f"{low:.2f}-{high:.2f}" for low, high in ranges))
    Console(width=120).print(table)
    sizes = [f"2^{n.bit_length() - 1}" for n in MIDDLE + LARGE]
    table = Table("kernel", *sizes, title="H200, by elements: with tiles of 2^14, and with tiles that fill the device")
    for path in KERNELS:
        shares_of_path = middle_shares(CARDS["H200"], path).values()
        table.add_row(path, *(f"{fixed:.2f} {even:.2f}" for fixed, even in shares_of_path))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
