"""Finds the main path in machine code, to count its instructions: the shortest through a loop that moves the bytes.

A loop's branches choose between whole and partial vectors, dtypes, fast paths and slow ones. The main path is the
shortest from the loop's head back to it with the wanted numbers of wide loads and stores, by which dtypes differ. Slow
paths are longer, so it takes none.
"""

from __future__ import annotations

import heapq
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """sets: the barrier, of six, that a load signals; waits: the barriers that it must wait for. Bits 105 to 125 of the
    machine code have: cycles to stall (4 bits), yield (1), the barrier for its results (3; 7 is none), the barrier for
    its operands (3), and a mask of the barriers to wait for (6)."""

    address: int
    text: str  # with its predicate
    sets: int | None = None
    waits: frozenset[int] = frozenset()

    @property
    def opcode(self) -> str:
        return self.text.split(" ", 2)[1 if self.text.startswith("@") else 0]

    @property
    def target(self) -> int | None:
        match = re.search(r"0x([0-9a-f]+)\s*$", self.text)
        return int(match[1], 16) if match else None


def tool(name: str) -> str | None:
    """One of the CUDA toolkit's binary tools: beside nvcc, or as Triton's wheel brings it."""
    if path := shutil.which(name):
        return path
    try:
        import triton
    except ImportError:
        return None
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(bundled) if bundled.exists() else None


def kernels(binary: Path, arch: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel for an architecture, by mangled name."""
    command = [str(tool("cuobjdump")), "-sass", "-arch", arch, str(binary)]
    return parsed(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parsed(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel in the output of ``cuobjdump -sass``, by mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for part in re.split(r"Function : ", text)[1:]:
        name, _, body = part.partition("\n")
        code = r"\s+/\* 0x([0-9a-f]{16}) \*/"
        lines = re.findall(rf"^\s+/\*([0-9a-f]{{4,}})\*/\s+(.*?)\s*;(?:{code}\s*\n{code})?", body, re.M)
        kernels[name.strip()] = [_instruction(*line) for line in lines]
    return kernels


def _instruction(address: str, text: str, low: str, high: str) -> Instruction:
    text = re.sub(r"\s+", " ", text)
    if not high:
        return Instruction(int(address, 16), text)
    control = int(high, 16) >> 105 - 64
    sets, mask = control >> 5 & 7, control >> 11 & 63
    return Instruction(
        int(address, 16), text, None if sets == 7 else sets, frozenset(b for b in range(6) if mask >> b & 1)
    )


def _edges(code: list[Instruction]) -> dict[int, list[int]]:
    """The addresses that may come after each address."""
    following = {a.address: b.address for a, b in pairwise(code)}
    meets: dict[str, int] = {}  # where the lanes of a convergence barrier go on
    edges: dict[int, list[int]] = {}
    for i in code:
        after = [following[i.address]] if i.address in following else []
        name = i.opcode.split(".")[0]
        if name == "BSSY":
            meets[i.text.split()[-2].rstrip(",")] = i.target or 0
        conditional = i.text.startswith("@") and not i.text.startswith("@!PT")
        if name == "BRA" and i.target is not None:
            conditional = conditional or re.search(r"BRA\.DIV|BRA(\.\w+)* !?U?P\d", i.text) is not None
            edges[i.address] = [i.target, *(after if conditional else [])]
        elif name == "CALL":  # ptxas for sm_80 to sm_89 leaves loops by calls that do not return
            edges[i.address] = after + ([i.target] if i.target is not None else [])
        elif name == "BSYNC":
            edges[i.address] = [meets.get(i.text.split()[-1], *after[:1])]
        elif name in ("EXIT", "RET"):  # no path is followed out of a function
            edges[i.address] = after if conditional else []
        else:
            edges[i.address] = after
    return edges


class _Run(NamedTuple):
    """Instructions that are always executed together, and the addresses of the runs that may come next."""

    code: list[Instruction]
    after: list[int]
    counts: tuple[int, ...]  # of the wanted opcodes


def _runs(code: list[Instruction], wanted: dict[str, int]) -> dict[int, _Run]:
    edges = _edges(code)
    following = {a.address: b.address for a, b in pairwise(code)}
    starts = {code[0].address}
    for address, after in edges.items():
        if after != [following.get(address)]:
            starts |= {*after} | {following.get(address, 0)}
    runs: dict[int, _Run] = {}
    run: list[Instruction] = []
    for i in code:
        run.append(i)
        if following.get(i.address) in starts or i is code[-1]:
            counts = tuple(sum(_matches(x.opcode, key) for x in run) for key in wanted)
            runs[run[0].address] = _Run(run, edges[i.address], counts)
            run = []
    return runs


def _matches(opcode: str, key: str) -> bool:
    return {*key.split(".")} <= {*opcode.split(".")}


def shortest_loop(code: list[Instruction], wanted: dict[str, int]) -> list[Instruction]:
    """The shortest closed path with exactly the wanted numbers of some opcodes, such as ``LDG.128``; [] for none."""
    runs = _runs(code, wanted)
    goal = tuple(wanted.values())
    best: list[Instruction] | None = None
    for head in sorted({t for a, run in runs.items() for t in run.after if t <= a}):
        path = _search(head, runs, goal, len(best) if best else None)
        best = path or best
    return best or []


def loads_before_use(path: list[Instruction]) -> bool:
    """Whether all loads from global memory are issued before anything needs what one of them has loaded."""
    return late_loads(path) == 0


def in_flight(path: list[Instruction]) -> int:
    """Instructions from the iteration's last load from global memory to the first that waits for one of its loads.

    0 where an instruction before the last load waits: a wait is for all loads that signal its barrier.
    """
    loads = [n for n, i in enumerate(path) if i.opcode.startswith("LDG")]
    barriers = {path[n].sets for n in loads}
    first = next((n for n in range(loads[0], len(path)) if barriers & path[n].waits), len(path))
    return max(0, first - loads[-1])


def late_loads(path: list[Instruction]) -> int:
    """The number of loads from global memory that come after an instruction that needs another load's result."""
    loaded: set[int] = set()
    used, late = False, 0
    for i in path:
        name = i.opcode.split(".")
        numbers = [int(n) for n in re.findall(r"\bR(\d+)", i.text)]
        if name[0] == "LDG":
            late += used or bool(loaded & {*numbers[1:]})
            words = 4 if "128" in name else 2 if "64" in name else 1
            loaded |= {*range(numbers[0], numbers[0] + words)}
        used = used or (name[0] != "LDG" and bool(loaded & {*numbers}))
    return late


def _search(head: int, runs: dict[int, _Run], goal: tuple[int, ...], limit: int | None) -> list[Instruction] | None:
    """The shortest path from a loop's head, its lowest address, back to it, if it is shorter than the limit.

    A* search; a place is an address and the counts of the wanted opcodes on the path to it. Places are dropped from
    which every path to the head is too long or exceeds the goal's counts: without that nested loops took minutes.
    """
    before: dict[int, list[int]] = {}
    for address, run in runs.items():
        for after in run.after if address >= head else ():
            before.setdefault(after, []).append(address)
    remaining = _least(head, before, {address: len(run.code) for address, run in runs.items()})
    least = [_least(head, before, {address: run.counts[n] for address, run in runs.items()}) for n in range(len(goal))]
    Place = tuple[int, tuple[int, ...]]
    start: Place = (head, (0,) * len(goal))
    queue: list[tuple[int, int, Place, Place | None]] = [(0, 0, start, None)]
    came_from: dict[Place, Place | None] = {}
    while queue:
        _, length, place, last = heapq.heappop(queue)
        if place in came_from:
            continue
        came_from[place] = last
        address, counts = place
        if address == head and counts == goal:
            path: list[Instruction] = []
            while last is not None:
                path = runs[last[0]].code + path
                last = came_from[last]
            return path
        run = runs[address]
        length += len(run.code)
        new_counts = tuple(a + b for a, b in zip(counts, run.counts, strict=True))
        for after in run.after:
            ends = after == head and new_counts == goal
            if after not in remaining:
                continue
            estimate = length + (0 if ends else remaining[after])
            if limit is not None and estimate >= limit:
                continue
            if ends or all(a + to_head[after] <= b for a, to_head, b in zip(new_counts, least, goal, strict=True)):
                heapq.heappush(queue, (estimate, length, (after, new_counts), place))
    return None


def _least(head: int, before: dict[int, list[int]], weights: dict[int, int]) -> dict[int, int]:
    """The least sum of weights on a path to the head, for each address that has one (Dijkstra)."""
    least: dict[int, int] = {}
    queue = [(weights[address], address) for address in before.get(head, ())]
    heapq.heapify(queue)
    while queue:
        total, address = heapq.heappop(queue)
        if address not in least:
            least[address] = total
            for earlier in before.get(address, ()):
                heapq.heappush(queue, (total + weights[earlier], earlier))
    return least
