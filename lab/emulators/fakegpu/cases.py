"""Cases that test the ops on the made-up devices: ``python -m lab.emulators.fakegpu.cases FOLDER [CASE ...]``.

FOLDER holds what build.py compiled. Prints a line of JSON for each case; lab/tests/test_cuda_host.py tests them all.
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
    """These cases and those of table.py. Imports torch, so call it after the Machine was made."""
    from lab.emulators.fakegpu.table import TABLE

    return {**TABLE, **CASES}


def stepped(machine: Machine, name: str, args: Any, device: int = 0, steps: int = 2) -> Any:
    """Takes steps on a device and by the reference, asserts equal bits after each; returns the device's arguments."""
    from memkern import reference
    from tests.support.helpers import assert_same
    from tests.support.kernels.arguments import cloned, gradients

    on_device, expected = machine.to_device(args, device), cloned(args)
    for step in range(steps):
        getattr(machine.ops, name)(*on_device)
        getattr(reference, name)(expected)
        assert_same([*machine.to_host(on_device)], [*expected], f"step {step}")
        grads = gradients(expected.params, step + 2, [expected.grads[0].dtype])
        on_device = on_device._replace(grads=machine.to_device(grads, device))
        expected = expected._replace(grads=grads)
    return on_device


def small(name: str, **options: Any) -> Any:
    """Arguments of a step op: small tensors of five layouts."""
    from tests.support.kernels.arguments import step_args

    return step_args(name, ("odd", "whole blocks", "unaligned", "0-dim", "empty"), **options)


# ---- the ops, beside the table's cases


@case
def muons_launches(machine: Machine) -> None:
    """All matrices together take these launches of each kernel."""
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
    """The results are those of torch's op, which is called once per device for a table of all bf16 values, also while
    another stream is captured. In a capture before that, they are those of the kernel's formula."""
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
        stream, captured = machine.new_stream(device), machine.new_stream(device)
        machine.use_stream(stream, device)
        on_device = machine.to_device(x, device)
        machine.graph.clear()
        machine.capture(stream, True)
        y, _ = machine.ops.few_bit_forward(on_device, *args)
        machine.capture(stream, False)
        assert len(machine.graph) == 1
        assert not machine.launches
        machine.replay()
        assert machine.kernels() == {"forward_by_table": 1}
        # rtol: bf16's last place. atol: 1 + tanh cancels, and tanh in fp32 is the host's here.
        torch.testing.assert_close(machine.to_host(y)[middle], expected[middle], rtol=2**-7, atol=2**-21)
        machine.capture(captured, True)
        for expected_launches in (
            {"list_values": 1, "keep_results": 1, "forward_by_table": 1},
            {"forward_by_table": 1},
        ):
            y, _ = machine.ops.few_bit_forward(on_device, *args)
            assert machine.kernels() == expected_launches
            assert_same(machine.to_host(y)[middle], expected[middle], "torch's bits")
        assert machine.is_capturing(captured)
        machine.capture(captured, False)


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
    """Else a launch would fail: its stream would not be of the current device."""
    import torch

    stream = machine.new_stream(device=1)
    machine.use_stream(stream, device=1)
    before = [machine.device.fakegpu_stream_lookups(device) for device in (0, 1)]
    assert machine.current_device() == 0
    for name in ("adam_step_", "lamb_step_"):
        stepped(machine, name, small(name), device=1)
    x = machine.to_device(torch.ones(300), 1)
    codes, scale = machine.ops.quantize_blockwise(x, 0, True, 128, None)
    assert {codes.device.index, scale.device.index} == {1}
    machine.ops.few_bit_encode(x, 1, [0.0], [0], 0)
    assert machine.current_device() == 0
    assert {launch.stream for launch in machine.launches} == {stream}
    assert machine.device.fakegpu_stream_lookups(1) > before[1]
    assert machine.device.fakegpu_stream_lookups(0) == before[0]


@case
def tensors_of_the_host_are_refused(machine: Machine) -> None:
    args = small("adam_step_")
    on_device = machine.to_device(args)
    mixed = on_device._replace(moments=[*on_device.moments[:1], args.moments[1], *on_device.moments[2:]])
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
    on_device, expected = machine.to_device(args)._replace(lr=args.lr), cloned(args)
    for step in range(3):
        machine.ops.lamb_step_(*on_device)
        reference.lamb_step_(expected)
        assert_same([*machine.to_host(on_device)], [*expected], f"step {step}")
        for rates in (on_device.lr, expected.lr):
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
        on_device, expected = machine.to_device(args), cloned(args)
        machine.use_stream(stream)
        machine.graph.clear()
        machine.capture(stream, True)
        getattr(machine.ops, name)(*on_device)
        machine.capture(stream, False)
        assert_same([*machine.to_host(on_device)], [*expected], "nothing runs while a graph is captured")
        assert machine.graph
        for step in range(2):
            machine.replay()
            getattr(reference, name)(expected)
            assert_same([*machine.to_host(on_device)], [*expected], f"replay {step}")
            other_grads = gradients(args.params, step + 5, [args.grads[0].dtype])
            getattr(machine.ops, name)(*on_device._replace(grads=machine.to_device(other_grads)))
            getattr(reference, name)(expected._replace(grads=other_grads))
            assert_same([*machine.to_host(on_device)], [*expected], f"eager step {step}")


@case
def a_step_beside_another_streams_capture(machine: Machine) -> None:
    """In another stream a step runs. In the default stream it fails with CUDA's error, until the capture has ended."""
    captured, stream = machine.new_stream(blocking=True), machine.new_stream()
    machine.capture(captured, True)
    machine.use_stream(stream)
    on_device = stepped(machine, "adam_step_", small("adam_step_"))
    assert machine.is_capturing(captured)
    machine.use_stream(None)
    fails(lambda: machine.ops.adam_step_(*on_device), "write_table: operation would make the legacy stream depend")
    machine.capture(captured, False)
    stepped(machine, "adam_step_", small("adam_step_"))


@case
def the_default_stream_beside_a_capture_that_does_not_wait_for_it(machine: Machine) -> None:
    """A step runs in the default stream. torch's own streams are of that kind."""
    captured = machine.new_stream(blocking=False)
    machine.capture(captured, True)
    machine.use_stream(None)
    stepped(machine, "adam_step_", small("adam_step_"))
    assert machine.is_capturing(captured)
    machine.capture(captured, False)


def main() -> int:
    machine, failed = Machine(Path(sys.argv[1])), False
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
        failed |= bool(error)
        print(json.dumps({"case": name, "error": error}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
