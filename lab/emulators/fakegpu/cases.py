"""What runs on the made-up devices: ``python -m lab.emulators.fakegpu.cases FOLDER [CASE ...]``, a line for each case.

FOLDER holds what build.py compiled. Imported, it only lists the cases: lab/tests/test_cuda_host.py has a test for each.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.emulators.fakegpu import Machine, memory_cases

CASES: dict[str, Callable[[Machine], None]] = {**memory_cases.CASES}


def case(function: Callable[[Machine], None]) -> Callable[[Machine], None]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def all_cases() -> dict[str, Callable[[Machine], None]]:
    """With those of every op's table, which imports torch: after the machine was made."""
    from lab.emulators.fakegpu.table import TABLE

    return {**TABLE, **CASES}


def stepped(machine: Machine, name: str, args: Any, device: int = 0, steps: int = 2) -> Any:
    """Some steps on a device and by the reference, equal in every bit after each; the device's arguments."""
    from memkern import reference
    from tests.support.helpers import assert_same
    from tests.support.kernels.arguments import cloned, gradients

    there, expected = machine.to_device(args, device), cloned(args)
    for step in range(steps):
        getattr(machine.ops, name)(*there)
        getattr(reference, name)(expected)
        assert_same([*machine.to_host(there)], [*expected], f"step {step}")
        grads = gradients(expected.params, step + 2, [expected.grads[0].dtype])
        there = there._replace(grads=machine.to_device(grads, device))
        expected = expected._replace(grads=grads)
    return there


def small(name: str, **options: Any) -> Any:
    from tests.support.kernels.arguments import step_args

    return step_args(name, ("odd", "whole blocks", "unaligned", "0-dim", "empty"), **options)


# ---- the ops, beside the table's cases


@case
def muons_launches(machine: Machine) -> None:
    """Of all matrices together."""
    from tests.support.kernels.arguments import MATRICES, arguments

    kernels = {
        "muon_momentum_": {"muon_prologue": 1, "muon_tiles": 1, "norm_tiles": 1, "norm_of_each": 1, "write_table": 2},
        "muon_apply_": {"muon_apply_prologue": 1, "muon_apply_tiles": 1, "write_table": 1},
    }
    for name, expected in kernels.items():
        getattr(machine.ops, name)(
            *machine.to_device(arguments(name, layouts=MATRICES[:6], kinds="codes", codec=(0, 0)))
        )
        assert machine.kernels() == expected


@case
def gelu_of_large_bf16_tensors(machine: Machine) -> None:
    """By a table of torch's results, for which its op is called once on a device, also beside another thread's capture;
    in a capture before that the table has those of the formula."""
    import torch

    from memkern.fewbit.tables import LEVELS
    from memkern.quant.codec import ACTIVATIONS
    from tests.support.activation_kernels import every_bf16
    from tests.support.helpers import assert_same

    x = every_bf16(8)
    args = ACTIVATIONS["gelu_tanh"], 0.0, 0.0, 3, *LEVELS["gelu_tanh", 3][2:]
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    middle = (x.abs() >= 2**-9) & (x.abs() < 6)
    for device in (0, 1):
        own, other = machine.new_stream(device), machine.new_stream(device)
        machine.use_stream(own, device)
        there = machine.to_device(x, device)
        machine.graph.clear()
        machine.capture(own, True)
        y, _ = machine.ops.few_bit_forward(there, *args)
        machine.capture(own, False)
        assert len(machine.graph) == 1
        assert not machine.launches
        machine.replay()
        assert machine.kernels() == {"forward_by_table": 1}
        # bf16's last place; where 1 + tanh cancels, the last places of tanh in fp32, which here is the host's.
        torch.testing.assert_close(machine.to_host(y)[middle], expected[middle], rtol=2**-7, atol=2**-21)
        machine.capture(other, True)
        for launches in (
            {"list_values": 1, "keep_results": 1, "forward_by_table": 1},
            {"forward_by_table": 1},
        ):
            y, _ = machine.ops.few_bit_forward(there, *args)
            assert machine.kernels() == launches
            assert_same(machine.to_host(y)[middle], expected[middle], "torch's bits")
        assert machine.is_capturing(other)
        machine.capture(other, False)


# ---- streams and devices


@case
def launches_go_to_the_current_stream(machine: Machine) -> None:
    stream = machine.new_stream()
    machine.use_stream(stream)
    stepped(machine, "adam_step_", small("adam_step_"), steps=1)
    assert {launch.stream for launch in machine.launches} == {stream}
    machine.kernels()
    machine.use_stream(None)
    stepped(machine, "lion_step_", small("lion_step_"), steps=1)
    assert {launch.stream for launch in machine.launches} == {None}


@case
def the_tensors_device_is_made_current(machine: Machine) -> None:
    """A launch in a stream of another device than the current one would fail."""
    import torch

    stream = machine.new_stream(device=1)
    machine.use_stream(stream, device=1)
    before = machine.device.fakegpu_stream_lookups(1), machine.device.fakegpu_stream_lookups(0)
    assert machine.current_device() == 0
    for name in ("adam_step_", "lamb_step_"):
        stepped(machine, name, small(name), device=1)
    x = machine.to_device(torch.ones(300), 1)
    codes, scale = machine.ops.quantize_blockwise(x, 0, True, 128, None)
    assert {codes.device.index, scale.device.index} == {1}
    machine.ops.few_bit_encode(x, 1, [0.0], [0], 0)
    assert machine.current_device() == 0
    assert {launch.stream for launch in machine.launches} == {stream}
    assert machine.device.fakegpu_stream_lookups(1) > before[0]
    assert machine.device.fakegpu_stream_lookups(0) == before[1]


@case
def tensors_of_the_host_are_refused(machine: Machine) -> None:
    args = small("adam_step_")
    there = machine.to_device(args)
    mixed = there._replace(moments=[*there.moments[:1], args.moments[1], *there.moments[2:]])
    machine.launches.clear()
    fails(lambda: machine.ops.adam_step_(*mixed), "exp_avg[1] must be on its parameter's device")
    assert not machine.launches


def fails(call: Callable[[], object], words: str) -> None:
    import pytest

    with pytest.raises(RuntimeError, match=re.escape(words)):
        call()


# ---- tables


@case
def numbers_on_the_host_are_read_at_every_step(machine: Machine) -> None:
    from memkern import reference
    from tests.support.helpers import assert_same
    from tests.support.kernels.arguments import cloned

    args = small("lamb_step_")
    there, expected = machine.to_device(args)._replace(lr=args.lr), cloned(args)
    for step in range(3):
        machine.ops.lamb_step_(*there)
        reference.lamb_step_(expected)
        assert_same([*machine.to_host(there)], [*expected], f"step {step}")
        for rates in (there.lr, expected.lr):
            rates[0].mul_(0.5)


@case
def a_table_larger_than_a_launch_carries(machine: Machine) -> None:
    import torch

    from tests.support.kernels.arguments import step_args

    args = step_args("lion_step_", ("one element",) * 400)
    stepped(machine, "lion_step_", args, steps=1)
    assert machine.kernels()["write_table"] > 1
    assert torch.ops.memkern_nvcc is machine.ops


# ---- captures


@case
def a_capture_records_and_replays(machine: Machine) -> None:
    """The graph's table is its own: an eager step with other gradients in between leaves it alone."""
    from memkern import reference
    from tests.support.helpers import assert_same
    from tests.support.kernels.arguments import cloned, gradients

    for name in ("adam_step_", "lars_step_"):
        args, stream = small(name), machine.new_stream()
        there, expected = machine.to_device(args), cloned(args)
        machine.use_stream(stream)
        machine.graph.clear()
        machine.capture(stream, True)
        getattr(machine.ops, name)(*there)
        machine.capture(stream, False)
        assert_same([*machine.to_host(there)], [*expected], "nothing runs while a graph is captured")
        assert machine.graph
        for step in range(2):
            machine.replay()
            getattr(reference, name)(expected)
            assert_same([*machine.to_host(there)], [*expected], f"replay {step}")
            other = gradients(args.params, step + 5, [args.grads[0].dtype])
            getattr(machine.ops, name)(*there._replace(grads=machine.to_device(other)))
            getattr(reference, name)(expected._replace(grads=other))
            assert_same([*machine.to_host(there)], [*expected], f"eager step {step}")


@case
def a_step_beside_another_streams_capture(machine: Machine) -> None:
    """On a stream of its own it runs. CUDA forbids the default stream then: the error is CUDA's, the next step runs."""
    other, own = machine.new_stream(blocking=True), machine.new_stream()
    machine.capture(other, True)
    machine.use_stream(own)
    there = stepped(machine, "adam_step_", small("adam_step_"))
    assert machine.is_capturing(other)
    machine.use_stream(None)
    fails(lambda: machine.ops.adam_step_(*there), "write_table: operation would make the legacy stream depend")
    machine.capture(other, False)
    stepped(machine, "adam_step_", small("adam_step_"))


@case
def the_default_stream_beside_a_capture_that_does_not_wait_for_it(machine: Machine) -> None:
    """As torch's own streams are."""
    other = machine.new_stream(blocking=False)
    machine.capture(other, True)
    machine.use_stream(None)
    stepped(machine, "adam_step_", small("adam_step_"))
    assert machine.is_capturing(other)
    machine.capture(other, False)


def main() -> int:
    machine, bad = Machine(Path(sys.argv[1])), 0
    cases = all_cases()
    for name in sys.argv[2:] or cases:
        machine.launches.clear()
        machine.errors.clear()
        machine.use_stream(None, 0)
        machine.use_stream(None, 1)
        error = ""
        try:
            cases[name](machine)
        except Exception:
            error = traceback.format_exc() + "".join(f"\nin a launch: {e!r}" for e in machine.errors)
        if not error and machine.errors:
            error = "".join(f"in a launch: {e!r}\n" for e in machine.errors)
        bad += bool(error)
        print(json.dumps({"case": name, "error": error}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
