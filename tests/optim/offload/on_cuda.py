"""Steps of HostOffload(step_on="device") on fake CUDA tensors, whose operators refuse tensors of two devices.

test_device.py runs these functions by fake_cuda.call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memkern import memory, optim
from memkern.optim import HostOffload, StepInBackward
from memkern.optim.offload import device
from tests.support.late_transfers import LateTransfers

WIDTH, COUNT = 1024, 12


class FakeTransfers(LateTransfers):
    """Checks the devices of each copy, and copies nothing: fake tensors have no values."""

    def _begin(self, way: str, to: Tensor, source: Tensor, *after: Any) -> Any:
        assert (to.device.type, source.device.type) == (("cpu", "cuda") if way == "down" else ("cuda", "cpu"))
        return way, 0


class FakeHostOffload(HostOffload):
    _transfers_of = staticmethod(FakeTransfers)


def bytes_and_devices_of_steps(name: str, options: dict[str, Any], in_backward: bool) -> dict[str, Any]:
    """Bytes on the device (weights, both buffers, peak of a backward pass and its step), and the states' devices."""
    device.BUCKET_BYTES = 2**22
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")) for _ in range(COUNT)]
        optimizer: Any = FakeHostOffload(
            getattr(optim, name), params, step_on="device", step_in_backward=in_backward, **options
        )

        def step() -> None:
            x = torch.zeros((), dtype=torch.bfloat16, device="cuda")
            for p in params:
                x = x + (p * p).sum()
            x.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if isinstance(optimizer, StepInBackward) != in_backward:
            raise AssertionError(type(optimizer))
        (stage,) = optimizer._stages.values()
        peak = memory.peak_bytes(step)
        states = [x for state in optimizer.state.values() for x in state.values()]
        # Each of these calls and the step after it read states and weights together.
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["block_size"] = 128
        step()
        if options:
            optim.to_fp32_state_dict(nn.ParameterList(params), optimizer)  # type: ignore[arg-type]
            optimizer.param_groups[0]["master_weights"] = "bf16+8"
            step()
        moved = [nn.Parameter(torch.empty_like(p)) for p in params]
        optimizer.param_groups[0]["params"], params[:] = moved, moved
        step()
        states += [x for state in optimizer.state.values() for x in state.values()]
        return {
            "weights": sum(p.nbytes for p in params),
            "buffers": sum(slot.memory.nbytes for slot in stage.slots),
            "peak": peak,
            "states": {x.device.type for x in states},
        }


# name of the class, whether it has master_weights, whether it steps in backward
RUNS = [
    *(("AdamW8bit", False, False), ("AdamW8bit", True, True), ("LAMB8bit", False, True), ("LAMB8bit", True, False)),
    *(("SGD8bit", True, False), ("AdamW", False, True)),
]


def all_steps() -> dict[tuple[str, bool, bool], dict[str, Any]]:
    """Results of :func:`bytes_and_devices_of_steps`, by entries of RUNS."""
    return {
        run: bytes_and_devices_of_steps(run[0], {"master_weights": "bf16+16"} if run[1] else {}, run[2]) for run in RUNS
    }


def devices_of_states_loaded_from_the_host() -> set[str]:
    """The states' devices after a state_dict on the CPU is loaded with other master_weights for CUDA parameters."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")) for _ in range(2)]
        optimizers = [optim.AdamW8bit(params, min_8bit_size=0, master_weights=w) for w in ("bf16+8", "bf16+16")]
        for p in params:
            p.grad = torch.empty_like(p)
        optimizers[0].step()
        state_dict = optimizers[0].state_dict()
        for state in state_dict["state"].values():
            state.update({key: x.cpu() for key, x in state.items()})
        optimizers[1].load_state_dict(state_dict)
        optimizers[1].step()
        return {x.device.type for state in optimizers[1].state.values() for x in state.values()}
