"""Cases on the made-up devices that test memory: which tables are kept from step to step, and who allocates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.emulators.fakegpu import Machine

CASES: dict[str, Callable[[Machine], None]] = {}


def case(function: Callable[[Machine], None]) -> Callable[[Machine], None]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def single(name: str, **options: Any) -> Any:
    """Arguments of a step op for one tensor."""
    from tests.support.kernels.arguments import step_args

    return step_args(name, ("whole blocks",), **options)


@case
def a_graphs_pool_while_torch_compile_warms_up(machine: Machine) -> None:
    """The warm-up's tables are kept, and none is in the graph's pool, by torch's own check of it."""
    import pytest
    import torch

    from lab.emulators.fakegpu.cases import small, stepped
    from memkern.schemas import STEP_OPS
    from tests.support.graph_pool import check_pool

    def live() -> set[int]:
        return {piece.address for piece in machine.pieces() if piece.owner == 2}

    for name in STEP_OPS:
        machine.use_stream(machine.new_stream())  # a table is found by its stream: no earlier case's is
        args = machine.to_device(small(name))
        machine.runtime.fakegpu_allocate_to_pool(1)
        getattr(machine.ops, name)(*args)
        machine.runtime.fakegpu_allocate_to_pool(0)
        assert machine.kernels()["write_table"] >= 1
        check_pool(live)
        getattr(machine.ops, name)(*args)
        assert machine.kernels()["write_table"] == 0, "the table of the warm-up is still there"
        stepped(machine, name, small(name), steps=1)
    x = machine.to_device(torch.ones(300))
    norm = machine.to_device(torch.zeros((), dtype=torch.float64))
    machine.runtime.fakegpu_allocate_to_pool(1)
    machine.ops.grad_norm_(norm, [x], None)
    check_pool(live)
    machine.runtime.fakegpu_out_of_memory(1)  # torch then allocates the table, in the pool: the check must find it
    machine.ops.grad_norm_(norm, [x, x], None)
    machine.runtime.fakegpu_out_of_memory(0)
    machine.runtime.fakegpu_allocate_to_pool(0)
    with pytest.raises(RuntimeError, match=r"Detected 1 tensor\(s\) in the cudagraph pool"):
        check_pool(live)


@case
def a_table_where_CUDA_has_no_memory_left(machine: Machine) -> None:
    """Where torch has cached all memory, the table is allocated by torch, and the next by CUDA again."""
    from lab.emulators.fakegpu.cases import small, stepped

    def pieces_of_cuda() -> int:
        return sum(piece.owner == 0 for piece in machine.pieces())

    # On streams of their own: a table is found by its stream and an address, and freed addresses come again.
    before = pieces_of_cuda()
    machine.use_stream(machine.new_stream())
    machine.runtime.fakegpu_out_of_memory(1)
    stepped(machine, "adam_step_", small("adam_step_"))
    machine.runtime.fakegpu_out_of_memory(0)
    assert pieces_of_cuda() == before
    machine.use_stream(machine.new_stream())
    stepped(machine, "adam_step_", small("adam_step_"))
    assert pieces_of_cuda() == before + 1


@case
def only_what_is_new_goes_to_the_device(machine: Machine) -> None:
    from lab.emulators.fakegpu.cases import small

    args = small("adam_step_")
    on_device = machine.to_device(args)
    machine.ops.adam_step_(*on_device)
    assert machine.kernels()["write_table"] == 1
    machine.ops.adam_step_(*on_device)
    assert machine.kernels() == {"adam_prologue": 1, "adam_tiles": 2}
    on_device = on_device._replace(grads=[*on_device.grads[:1], machine.to_device(args.grads[1]), *on_device.grads[2:]])
    machine.ops.adam_step_(*on_device)
    assert machine.kernels() == {"write_table": 1, "adam_prologue": 1, "adam_tiles": 2}


@case
def another_stream_with_the_handle_of_a_destroyed_one(machine: Machine) -> None:
    """The destroyed stream's table is not reused while it is still being written. The steps have other parameters, but
    tables are found by the first parameter's address, and all empty ones have the same."""
    from memkern import reference
    from tests.support.helpers import assert_same
    from tests.support.kernels.arguments import step_args

    expected = [step_args("lion_step_", ("empty", layout)) for layout in ("odd", "whole blocks")]
    on_device = [machine.to_device(args) for args in expected]
    stream = machine.new_stream()
    machine.use_stream(stream)
    machine.pending = []
    machine.ops.lion_step_(*on_device[0])
    pending, machine.pending = machine.pending, None
    machine.replace_stream(stream)
    machine.ops.lion_step_(*on_device[1])
    for launch in pending:
        machine.run(launch)
    for args, computed in zip(expected, on_device, strict=True):
        reference.lion_step_(args)
        assert_same([*machine.to_host(computed)], [*args])
    machine.launches.clear()
    machine.ops.lion_step_(*on_device[1])
    assert machine.kernels()["write_table"] == 0, "the same stream's table is found"


@case
def each_of_many_parameters_keeps_its_table(machine: Machine) -> None:
    """Where each parameter is stepped by itself, over and over, as StepInBackward does."""
    args = [machine.to_device(single("lion_step_")) for _ in range(150)]
    machine.runs = False
    for _ in range(3):
        machine.noted.clear()
        for of_parameter in args:
            machine.ops.lion_step_(*of_parameter)
    machine.runs = True
    written = [name for name in machine.noted if "write_table" in name]
    assert len(machine.noted) >= 2 * len(args)
    assert not written


@case
def tables_are_bounded(machine: Machine) -> None:
    """All tables together take 16 to 33 MiB: those unused for the longest time are freed."""
    from tests.support.kernels.arguments import step_args

    machine.runs = False
    many = machine.to_device(step_args("lion_step_", ("one element",) * 1500))

    def tables() -> list[int]:
        return [piece.size for piece in machine.pieces() if piece.owner == 0]

    peak_bytes, firsts = 0, [machine.to_device(single("lion_step_")) for _ in range(240)]
    for i, first in enumerate(firsts):
        lists = {
            name: [*getattr(first, name), *getattr(many, name)]
            for name in ("params", "grads", "moments", "scales", "steps")
        }
        machine.ops.lion_step_(*many._replace(**lists, group=[0, *many.group]))
        peak_bytes = max(peak_bytes, sum(tables()))
        if i == 0:
            assert max(tables()) > 200_000
    machine.runs = True
    assert 16 << 20 < peak_bytes <= 33 << 20, peak_bytes
    assert len(tables()) > 64
