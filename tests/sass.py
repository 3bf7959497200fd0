"""Static instruction counts from machine code: the shortest way through a kernel's main loop that moves the bytes.

A loop's branches choose between whole and partial vectors, dtypes, fast paths and slow ones. The way counted is the
shortest from the loop's head back to it that contains the wanted numbers of wide loads and stores, which tell one
dtype from another; slow paths are longer, so it takes none.
"""

from __future__ import annotations

import heapq
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    text: str  # with its predicate

    @property
    def opcode(self) -> str:
        return self.text.split(" ", 2)[1 if self.text.startswith("@") else 0]

    @property
    def target(self) -> int | None:
        found = re.search(r"0x([0-9a-f]+)\s*$", self.text)
        return int(found[1], 16) if found else None


def tool(name: str) -> str | None:
    """One of the CUDA toolkit's binary tools: beside nvcc, or as Triton's wheel brings it."""
    if found := shutil.which(name):
        return found
    try:
        import triton
    except ImportError:
        return None
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(bundled) if bundled.exists() else None


def kernels(binary: Path, arch: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel for an architecture, by mangled name."""
    command = [str(tool("cuobjdump")), "-sass", "-arch", arch, str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[Instruction]] = {}
    for part in re.split(r"Function : ", text)[1:]:
        name, _, body = part.partition("\n")
        lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", body, re.M)
        found[name.strip()] = [Instruction(int(a, 16), re.sub(r"\s+", " ", t)) for a, t in lines]
    return found


def _edges(code: list[Instruction]) -> dict[int, list[int]]:
    """For each address those that may come next."""
    follow = {a.address: b.address for a, b in zip(code, code[1:], strict=False)}
    meets: dict[str, int] = {}  # where the lanes of a convergence barrier go on
    edges: dict[int, list[int]] = {}
    for i in code:
        after = [follow[i.address]] if i.address in follow else []
        name = i.opcode.split(".")[0]
        if name == "BSSY":
            meets[i.text.split()[-2].rstrip(",")] = i.target or 0
        conditional = i.text.startswith("@") and not i.text.startswith("@!PT")
        if name == "BRA" and i.target is not None:
            conditional = conditional or re.search(r"BRA\.DIV|BRA(\.\w+)* !?U?P\d", i.text) is not None
            edges[i.address] = [i.target, *(after if conditional else [])]
        elif name == "BSYNC":
            edges[i.address] = [meets.get(i.text.split()[-1], *after[:1])]
        elif name in ("EXIT", "RET"):
            edges[i.address] = after if conditional else []
        else:
            edges[i.address] = after
    return edges


def shortest_loop(code: list[Instruction], wanted: dict[str, int]) -> Counter[str]:
    """Opcodes on the shortest closed way with exactly the wanted numbers of some opcodes (such as ``LDG.E.128``)."""
    edges = _edges(code)
    at = {i.address: i for i in code}
    keys = [*wanted]

    def count(i: Instruction, seen: tuple[int, ...]) -> tuple[int, ...] | None:
        new = tuple(n + (_matches(i.opcode, key)) for n, key in zip(seen, keys, strict=True))
        return new if all(n <= wanted[key] for n, key in zip(new, keys, strict=True)) else None

    best: list[int] | None = None
    for head in sorted({t for a, after in edges.items() for t in after if t < a}):
        way = _search(head, edges, at, count, tuple(wanted.values()), len(best) if best else None)
        if way and (best is None or len(way) < len(best)):
            best = way
    return Counter(at[a].opcode.split(".")[0] for a in best or [])


def _matches(opcode: str, key: str) -> bool:
    parts = set(opcode.split("."))
    return set(key.split(".")) <= parts


def _search(head: int, edges: dict, at: dict, count: object, goal: tuple, limit: int | None) -> list[int] | None:
    start = count(at[head], (0,) * len(goal))  # type: ignore[operator]
    if start is None:
        return None
    queue: list[tuple[int, int, tuple[int, ...]]] = [(1, head, start)]
    came: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]] | None] = {(head, start): None}
    while queue:
        length, address, seen = heapq.heappop(queue)
        if limit and length >= limit:
            return None
        for after in edges[address]:
            if after == head and seen == goal:
                return [*_back((address, seen), came)]
            if after not in at:
                continue
            new = count(at[after], seen)  # type: ignore[operator]
            if new is not None and (after, new) not in came:
                came[(after, new)] = (address, seen)
                heapq.heappush(queue, (length + 1, after, new))
    return None


def _back(state: tuple | None, came: dict) -> Iterator[int]:
    while state is not None:
        yield state[0]
        state = came[state]
