"""Runs the threads of a grid through a PTX kernel (see ptx_emulator): memory, branches and barriers, warps."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from lab.emulators.ptx_checks import Accesses, Checks, Now
from lab.emulators.ptx_emulator import (
    SIZES,
    UNSIGNED,
    WARP,
    Array,
    Instruction,
    Kernel,
    Memory,
    Module,
    PtxError,
    bits_of,
    values,
)
from lab.emulators.ptx_instructions import Instructions

RUNNING, AT_BARRIER, EXITED = 0, 1, 2


class Threads(Instructions):
    """All threads of some of a grid's blocks, with a numpy array per register."""

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        blocks: Array,
        all_blocks: int,
        threads: int,
        params: bytes,
        memory: Memory,
        shared_bytes: int,
        checks: Checks | None = None,
    ) -> None:
        self.kernel, self.memory, self.checks = kernel, memory, checks
        self.count = n = len(blocks) * threads
        lane = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        self.block = np.repeat(np.arange(len(blocks)), threads)
        self.thread = lane
        self.warp_start = np.arange(n) - lane.astype(np.int64) % WARP  # index of the warp's first thread
        self.warp_end = np.minimum(self.warp_start + WARP, (self.block + 1) * threads)
        self.lane = lane % np.uint32(WARP)
        self.special = {
            "%tid.x": lane,
            "%ctaid.x": np.repeat(blocks.astype(np.uint32), threads),
            "%ntid.x": np.full(n, threads, np.uint32),
            "%nctaid.x": np.full(n, all_blocks, np.uint32),
            "%laneid": self.lane,
            **{f"%{what}.{axis}": np.zeros(n, np.uint32) for what in ("tid", "ctaid") for axis in "yz"},
            **{f"%{what}.{axis}": np.ones(n, np.uint32) for what in ("ntid", "nctaid") for axis in "yz"},
        }
        room = np.zeros(len(params) + 16, np.uint8)
        self.params = room[-room.ctypes.data % 16 :][: len(params)]  # aligned to 16 bytes, as on a GPU
        self.params[:] = np.frombuffer(params, np.uint8)
        self.symbols = {
            **{name: memory.add(array) for name, array in module.constants.items()},
            **{name: memory.add(self.params) + offset for name, (offset, _) in kernel.params.items()},
            **kernel.shared,
        }
        # Shared memory that nobody wrote is NaN.
        self.shared = np.full((len(blocks), kernel.shared_bytes + shared_bytes), 0xFF, np.uint8)
        # For the checks: numbers in the whole grid, and barriers passed.
        self.block_number = np.repeat(blocks, threads).astype(np.int64)
        self.number = self.block_number * threads + lane
        self.warp_number = self.number - lane % WARP
        self.clock, self.turn, self.exchange = (np.zeros(n, np.int64) for _ in range(3))
        self.shared_accesses = Accesses(self.shared.size) if checks else None
        self.shared_written = np.zeros(self.shared.size if checks else 0, bool)
        # Copies to shared memory that have not arrived (cp.async): threads, numbers of their groups, offsets; and for
        # every byte of shared memory whether a copy to it has not arrived.
        self.copies: list[tuple[Array, Array, Array]] = []
        self.arriving = np.zeros(self.shared.size, bool)
        self.groups = np.zeros(n, np.int64)  # how many groups of copies a thread has committed
        self.registers: dict[str, Array] = {}
        self.pc = np.zeros(n, np.int64)
        self.state = np.zeros(n, np.uint8)

    # ---- running

    def run(self) -> None:
        code = self.kernel.code
        with np.errstate(all="ignore"):
            while (self.state == RUNNING).any():
                # The threads furthest behind go first, so that threads that diverged meet again.
                running = self.state == RUNNING
                if self.checks:
                    running = self.checks.chosen(running, self.thread)
                here = int(self.pc[running].min())
                if here >= len(code):
                    self.state[running & (self.pc >= len(code))] = EXITED
                    continue
                at = np.nonzero(running & (self.pc == here))[0]
                self.pc[at] += 1
                instruction = code[here]
                if instruction.guard:
                    name, negated = instruction.guard
                    at = at[self.bits(name)[at] != negated]
                if len(at):
                    self.execute(instruction, at)
        if (self.state == AT_BARRIER).any():
            raise PtxError(f"{self.kernel.name}: threads wait at a barrier for others that have exited")

    def execute(self, i: Instruction, at: Array) -> None:
        method = getattr(self, f"do_{i.op[0]}", None)
        if method is None:
            raise PtxError(f"unknown instruction: {i.text}")
        self.kernel.executed[".".join(i.op)] += len(at)
        method(i, i.op[-1], at)

    # ---- memory

    def access(
        self, i: Instruction, operand: str, at: Array, lanes: int, size: int
    ) -> list[tuple[Array, Array, Array]]:
        """Where ``lanes`` values of ``size`` bytes are, by buffer: indices into at, the buffer, offsets into it."""
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if not match:
            raise PtxError(f"cannot read the address of {i.text}")
        base, offset = match[1], int(match[2] or "0", 0)
        is_word = base in self.kernel.registers and SIZES[self.kernel.registers[base]] == 4
        address = self.get(base, "u32" if is_word else "u64", at).astype(np.uint64) + np.uint64(offset & (1 << 64) - 1)
        if "shared" in i.op:
            start = address.astype(np.int64)
            outside = (start < 0) | (start + lanes * size > self.shared.shape[1])
            if outside.any() or (start % (lanes * size)).any():
                raise PtxError(f"{i.text}: outside of shared memory, or not aligned")
            return [(np.arange(len(at)), self.shared.reshape(-1), start + self.block[at] * self.shared.shape[1])]
        return self.memory.find(address, lanes * size, i.text)

    def check(self, i: Instruction, at: Array, buffer: Array, places: Array, writes: bool) -> Array | None:
        """Has the checks note an access; ``places``: a row of offsets into the buffer per thread. See Checks.read."""
        if "shared" in i.op and self.arriving[places].any():
            raise PtxError(f"{self.kernel.name}: {i.text}: uses bytes that a copy is on its way to")
        if not self.checks or "param" in i.op or "const" in i.op:
            return None
        of_all = self.number, self.block_number, self.warp_number, self.clock, self.turn, self.exchange
        now = Now(*(x[at] for x in of_all))
        if "shared" in i.op:
            accesses, written = self.shared_accesses, self.shared_written
            assert accesses
        else:
            address = buffer.ctypes.data
            accesses, written = self.checks.of_launch(address, len(buffer)), self.checks.unwritten.get(address)
        record = self.checks.write if writes else self.checks.read
        return record(accesses, written, places, now, f"{self.kernel.name}: {i.text}", "shared" not in i.op)

    def do_ld(self, i: Instruction, kind: str, at: Array) -> None:
        names = i.operands[0].strip("{} ").replace(" ", "").split(",")
        size = SIZES[kind]
        for which, buffer, offset in self.access(i, i.operands[1], at, len(names), size):
            places = offset[:, None] + np.arange(len(names) * size)
            spoiled = self.check(i, at[which], buffer, places, writes=False)
            for k, name in enumerate(names):
                place = (offset + k * size)[:, None] + np.arange(size)
                bits = np.ascontiguousarray(buffer[place]).view(UNSIGNED[size])[:, 0]
                if spoiled is not None:
                    bits[spoiled] = UNSIGNED[size](-1 % 256**size)
                self.put(name, values(bits, kind), kind, at[which])

    do_ldu = do_ld

    def do_st(self, i: Instruction, kind: str, at: Array) -> None:
        names = i.operands[1].strip("{} ").replace(" ", "").split(",")
        size = SIZES[kind]
        for which, buffer, offset in self.access(i, i.operands[0], at, len(names), size):
            columns = [bits_of(self.get(name, kind, at[which]), kind) for name in names]
            places = offset[:, None] + np.arange(len(names) * size)
            threads = at[which]
            if self.checks and self.checks.same_values and "shared" in i.op:
                raw = np.concatenate([np.ascontiguousarray(x)[:, None].view(np.uint8) for x in columns], 1)
                new = self.other_values(threads, places, raw)
                threads, places = threads[new], places[new]
            self.check(i, threads, buffer, places, writes=True)
            for k, bits in enumerate(columns):
                buffer[(offset + k * size)[:, None] + np.arange(size)] = bits[:, None].view(np.uint8)

    def other_values(self, threads: Array, places: Array, raw: Array) -> Array:
        """The threads that store a new value to shared memory: of equal stores to one place only the first."""
        assert self.shared_accesses
        accesses, clock = self.shared_accesses, self.clock[threads][:, None]
        same = (self.shared.reshape(-1)[places] == raw) & (accesses.write_clock[places] == clock)
        new = np.nonzero(~(same & (accesses.writer[places] >= 0)).all(1))[0]
        place_and_value = np.concatenate([places[new, :1], raw[new]], 1)
        return new[np.sort(np.unique(place_and_value, axis=0, return_index=True)[1])]

    def do_cp(self, i: Instruction, _: str, at: Array) -> None:
        """cp.async. The emulator copies at once, but accesses to the bytes raise until the thread has waited for the
        copy's group."""
        if "commit_group" in i.op:
            self.groups[at] += 1
        elif "wait_group" in i.op:
            self.arrive(at, int(i.operands[0]))
        elif "async" in i.op and len(i.operands) in (3, 4):
            size = int(i.operands[2], 0)
            counts = self.get(i.operands[3], "u32", at) if len(i.operands) == 4 else np.full(len(at), size)
            for count in np.unique(counts):  # bytes that are copied; the rest of the size becomes 0
                self.copy(i, at[counts == count], int(count), size)
        else:
            raise PtxError(f"unknown instruction: {i.text}")

    def copy(self, i: Instruction, at: Array, count: int, size: int) -> None:
        load, store = (i._replace(op=op) for op in (["ld", "global", "b8"], ["st", "shared", "b8"]))
        ((_, shared, target),) = self.access(store, i.operands[0], at, 1, size)
        all_places = target[:, None] + np.arange(size)
        self.check(store, at, shared, all_places, writes=True)
        shared[all_places[:, count:]] = 0
        for which, buffer, offset in self.access(load, i.operands[1], at, 1, count) if count else ():
            source, places = offset[:, None] + np.arange(count), all_places[which, :count]
            spoiled = self.check(load, at[which], buffer, source, writes=False)
            shared[places] = buffer[source]
            if spoiled is not None:
                shared[places[spoiled]] = 0xFF
        self.arriving[all_places] = True
        self.copies.append((at, self.groups[at], all_places))

    def arrive(self, at: Array, pending: int) -> None:
        """All groups of these threads have arrived, but for the last ``pending``."""
        waits = np.zeros(self.count, bool)
        waits[at] = True
        left = []
        for threads, group, places in self.copies:
            arrived = waits[threads] & (group < self.groups[threads] - pending)
            self.arriving[places[arrived]] = False
            if not arrived.all():
                left.append((threads[~arrived], group[~arrived], places[~arrived]))
        self.copies = left

    def do_cvta(self, i: Instruction, kind: str, at: Array) -> None:
        # An address of shared memory keeps its value: an access without .shared finds no buffer there, and raises.
        self.put(i.operands[0], self.get(i.operands[1], kind, at), kind, at)

    # ---- control

    def do_bra(self, i: Instruction, _: str, at: Array) -> None:
        self.pc[at] = self.kernel.labels[i.operands[0]]

    def do_ret(self, i: Instruction, _: str, at: Array) -> None:
        self.state[at] = EXITED

    do_exit = do_ret

    def do_bar(self, i: Instruction, _: str, at: Array) -> None:
        if "warp" in i.op:
            self.together(i, i.operands[0], at)
            self.turn[at] += 1
            return
        self.state[at] = AT_BARRIER
        for block in np.unique(self.block[at]):
            mine = self.block == block
            if (self.state[mine] == AT_BARRIER).all():
                if len({*self.pc[mine].tolist()}) > 1:
                    raise PtxError(f"threads of a block wait at different barriers: {i.text}")
                self.state[mine] = RUNNING
                self.clock[mine] += 1

    do_barrier = do_bar

    def do_membar(self, i: Instruction, _: str, at: Array) -> None:
        pass

    do_fence = do_membar

    # ---- warps

    def together(self, i: Instruction, mask: str, at: Array) -> None:
        """Raises unless all lanes of each warp's mask are here."""
        if (self.get(mask, "b32", at) != 0xFFFFFFFF).any():
            raise PtxError(f"only whole warps are known here: {i.text}")
        here = np.zeros(self.count, bool)
        here[at] = True
        starts = np.unique(self.warp_start[at])
        for start in starts:
            if not here[start : self.warp_end[start]].all():
                raise PtxError(f"some lanes of a warp are elsewhere: {i.text}")
        self.exchange[at] += 1

    def do_shfl(self, i: Instruction, kind: str, at: Array) -> None:
        target, source, index, clamp, mask = i.operands
        self.together(i, mask, at)
        lane, k = self.lane[at].astype(np.int64), self.get(index, "u32", at).astype(np.int64)
        c = self.get(clamp, "u32", at).astype(np.int64)
        width_mask, last = c >> 8 & 31, c & 31
        first, limit = lane & width_mask, (lane & width_mask) | (last & ~width_mask)
        mode = next(m for m in ("bfly", "down", "up", "idx") if m in i.op)
        other = {"bfly": lane ^ k, "down": lane + k, "up": lane - k, "idx": first | (k & ~width_mask & 31)}[mode]
        valid = other >= limit if mode == "up" else other <= limit
        name, *predicate = target.split("|")
        everyone = np.zeros(self.count, UNSIGNED[4])
        everyone[at] = self.get(source, "b32", at)
        self.put(name, everyone[self.warp_start[at] + np.where(valid, other, lane)], "b32", at)
        if predicate:
            self.put(predicate[0], valid, "pred", at)

    def do_redux(self, i: Instruction, kind: str, at: Array) -> None:
        target, source, mask = i.operands
        self.together(i, mask, at)
        reduce = {
            "max": np.maximum,
            "min": np.minimum,
            "add": np.add,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
        }
        x, result = self.get(source, kind, at), np.zeros(len(at), UNSIGNED[4])
        for start in np.unique(self.warp_start[at]):
            mine = self.warp_start[at] == start
            result[mine] = bits_of(reduce[i.op[2]].reduce(x[mine]), kind)
        self.put(target, result, "b32", at)

    def do_ldmatrix(self, i: Instruction, _: str, at: Array) -> None:
        """Loads 8 x 8 matrices of 16-bit numbers: a lane's address is that of a row; each lane gets two of a matrix."""
        for name, rows, place in self.matrices(i, i.operands[0], i.operands[1], at):
            self.check(i, at, self.shared, rows + place, writes=False)
            pair = self.shared.reshape(-1)[rows + place].view(np.uint16).astype(np.uint32)
            self.put(name, pair[:, 0] | pair[:, 1] << np.uint32(16), "b32", at)

    def do_stmatrix(self, i: Instruction, _: str, at: Array) -> None:
        for name, rows, place in self.matrices(i, i.operands[1], i.operands[0], at):
            pair = self.get(name, "b32", at)
            self.check(i, at, self.shared, rows + place, writes=True)
            self.shared.reshape(-1)[rows + place] = pair[:, None].view(np.uint8)

    def matrices(self, i: Instruction, names: str, address: str, at: Array) -> Iterator[tuple[str, Array, Array]]:
        """For each matrix its register, and where in shared memory each thread's four bytes are."""
        if not {"m8n8", "shared", "b16"} <= {*i.op}:
            raise PtxError(f"unknown instruction: {i.text}")
        self.together(i, "-1", at)
        (_, _, offsets), *_ = self.access(i, address, at, 1, 16)
        rows = np.zeros(self.count, np.int64)
        rows[at] = offsets
        lane = self.lane[at].astype(np.int64)
        for k, name in enumerate(names.strip("{} ").replace(" ", "").split(",")):
            if "trans" in i.op:
                row = 2 * (lane % 4)[:, None] + np.repeat([0, 1], 2)
                place = 2 * (lane // 4)[:, None] + np.tile([0, 1], 2)
            else:
                row, place = (lane // 4)[:, None], 4 * (lane % 4)[:, None] + np.arange(4)
            yield name, rows[self.warp_start[at][:, None] + 8 * k + row], place

    def do_vote(self, i: Instruction, _: str, at: Array) -> None:
        target, source, mask = i.operands
        self.together(i, mask, at)
        votes = np.zeros(self.count + WARP, bool)
        votes[at] = self.get(source, "pred", at)
        lanes = votes[self.warp_start[at][:, None] + np.arange(WARP)]
        inside = self.warp_start[at][:, None] + np.arange(WARP) < self.warp_end[at][:, None]
        if "ballot" in i.op:
            self.put(target, (lanes & inside) @ (1 << np.arange(WARP)), "b32", at)
        else:
            self.put(target, (lanes & inside).any(1) if "any" in i.op else (lanes | ~inside).all(1), "pred", at)
