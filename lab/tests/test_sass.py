"""sass.shortest_loop finds the shortest path through a loop, in machine code written by hand."""

from __future__ import annotations

from lab.emulators.sass import Instruction, shortest_loop


def code(text: str) -> list[Instruction]:
    """One instruction per line, sixteen bytes apart; a name before a colon labels it as a target."""
    lines = [line.strip().rpartition(": ") for line in text.strip().splitlines()]
    addresses = {label: f"{16 * n:#x}" for n, (label, _, _) in enumerate(lines) if label}
    words = ([addresses.get(word, word) for word in instruction.split()] for _, _, instruction in lines)
    return [Instruction(16 * n, " ".join(parts)) for n, parts in enumerate(words)]


def opcodes(text: str, **wanted: int) -> str:
    return " ".join(i.opcode for i in shortest_loop(code(text), wanted))


NESTED_LOOPS = """
    batch: LDG R1
    turn: LDGSTS [R2]
    @P1 BRA slow
    fast: FADD R3
    @P0 BRA turn
    STG R4
    @P2 BRA batch
    EXIT
    slow: FMUL R3
    FMUL R3
    BRA fast
"""


def test_the_shortest_path_with_the_wanted_instructions() -> None:
    assert opcodes(NESTED_LOOPS, LDGSTS=1) == "LDGSTS BRA FADD BRA"
    assert opcodes(NESTED_LOOPS, LDG=1, LDGSTS=1) == "LDG LDGSTS BRA FADD BRA STG BRA"
    assert opcodes(NESTED_LOOPS, LDGSTS=2, STG=1) == "LDG LDGSTS BRA FADD BRA LDGSTS BRA FADD BRA STG BRA"
    assert opcodes(NESTED_LOOPS, LDGSTS=1, FMUL=2) == "LDGSTS BRA FMUL FMUL BRA FADD BRA"
    assert opcodes(NESTED_LOOPS, LDG=1, STG=2) == "", "there is none"


def test_a_loop_is_left_by_a_call_that_does_not_return() -> None:
    """ptxas for sm_80 does so. A call of a function does return, but no path is followed out of the function."""
    left_by_a_call = """
        batch: LDG R1
        CALL.REL.NOINC function
        turn: FADD R3
        @P0 CALL.REL.NOINC after
        BRA turn
        after: STG R4
        @P1 BRA batch
        EXIT
        function: MUFU R5
        RET
    """
    assert opcodes(left_by_a_call, LDG=1, STG=1) == "LDG CALL.REL.NOINC FADD CALL.REL.NOINC STG BRA"
    assert opcodes(left_by_a_call, FADD=1) == "FADD CALL.REL.NOINC BRA"
    assert opcodes(left_by_a_call, MUFU=1) == ""
