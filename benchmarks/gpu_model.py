"""python -m benchmarks.gpu_model: the share of a card's copy bandwidth that each CUDA kernel can reach, from counts.

Not a measurement: something to hold the first measurement against. A kernel that moves B bytes and issues I
instructions per element takes at least the longer of ::

    t_memory = B / copy bandwidth
    t_issue  = I / (0.85 * multiprocessors * 128 * clock)

128 lanes of a multiprocessor issue an instruction per cycle (CUDA C++ Programming Guide, Compute Capabilities); 0.85
is what loops with few stalls reach. Latencies, the tails of a grid and the filling of tables are left out.
Instructions are those of the fast paths, from tests/support/cuda_kernels.json, counted in the machine code of each
architecture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

COUNTS = Path(__file__).resolve().parents[1] / "tests" / "support" / "cuda_kernels.json"
ISSUED = 0.85  # of the slots
LANES = 128


class Card(NamedTuple):
    """Multiprocessors, boost clock in GHz and memory bandwidth in GB/s as the vendor's data sheets have them; a copy
    reaches about 0.9 of the latter."""

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
    "H100 SXM": Card("sm_90", 132, 1.755, 3350),
    "H200": Card("sm_90", 132, 1.755, 4800),
    "RTX 5090": Card("sm_120", 170, 2.41, 1792),
}
# Read and written per element: gradient, parameter twice, two codes twice, two scales of blocks of 256 twice.
SCALES = 2 * 2 * 4 / 256
BYTES = {
    "AdamW fp32": 4 + 8 + 4 + SCALES,
    "AdamW bf16": 2 + 4 + 4 + SCALES,
    "AdamW bf16+8": 2 + 4 + 4 + 2 + SCALES,
    "AdamW bf16+16": 2 + 4 + 4 + 4 + SCALES,
    "AdamW fp32, v in 4 bits": 4 + 8 + 3 + SCALES,
    "AdamW bf16, v in 4 bits": 2 + 4 + 3 + SCALES,
    "LAMB norms fp32": 4 + 4 + 2 + SCALES / 2,
    "LAMB norms bf16": 2 + 2 + 2 + SCALES / 2,
    "LAMB bf16": 2 + 4 + 4 + SCALES,
    "Lion fp32": 4 + 8 + 2 + SCALES / 2,
    "Lion bf16": 2 + 4 + 2 + SCALES / 2,
    "power codes fp32": 5 + 4 / 256,
    "power codes bf16": 3 + 4 / 256,
    "power values fp32": 5 + 4 / 256,
    "power values bf16": 3 + 4 / 256,
    "GELU 3-bit forward bf16": 4 + 3 / 8,
    "GELU 3-bit backward bf16": 4 + 3 / 8,
    "GELU 3-bit backward fp32": 8 + 3 / 8,
}


def share_of_copy(card: Card, size: float, instructions: float) -> float:
    """Of the copy bandwidth, 1 where memory limits."""
    memory = size / (card.copy * 1e9)
    issue = instructions / (ISSUED * card.multiprocessors * LANES * card.clock * 1e9)
    return min(1.0, memory / issue)


def shares() -> dict[str, dict[str, float]]:
    """kernel -> card -> share."""
    counts = json.loads(COUNTS.read_text())["instructions per element"]
    return {
        kernel: {name: share_of_copy(card, size, counts[kernel][card.arch]) for name, card in CARDS.items()}
        for kernel, size in BYTES.items()
    }


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_model", description=__doc__.splitlines()[0]
    ).parse_args()
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "bytes per element", *CARDS, title="Share of the copy bandwidth, modelled")
    for kernel, row in shares().items():
        table.add_row(kernel, f"{BYTES[kernel]:.2f}", *(f"{share:.2f}" for share in row.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
