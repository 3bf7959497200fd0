"""Training with weights on the host takes the expected bytes of the host (measured) and of the device (counted)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from memkern.__main__ import main
from memkern.train import checkpoint as checkpoints
from tests.stream.runs import STREAMED as TECHNIQUES
from tests.stream.runs import Model, model_for, optimizer_for, train
from tests.support.helpers import first_full
from tests.support.train_helpers import small_run_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize(("name", "bytes_per_parameter"), first_full([("adamw", 5.0625), ("muon", 4.03125)]))
def test_the_host_holds_weights_states_and_few_gradients(name: str, bytes_per_parameter: float) -> None:
    """The resident set holds weights (2 bytes), errors (1), moments and their scales. At its peak it also holds a few
    blocks' weights and gradients, as the device is the CPU. 5 % is for malloc and Python: 1 % in most runs, 3.3 % in
    one on a busy machine. A byte too many for each parameter would be 20 %."""
    command = [sys.executable, "-m", "tests.stream.host_bytes", name]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=300).stdout)
    expected = bytes_per_parameter * measured["params"]
    assert measured["rest"] == pytest.approx(expected, rel=0.05)
    assert measured["peak"] < 1.05 * expected + 8 * measured["block"]


class Counted:
    """Counts the bytes of weights and gradients on a device; raises OutOfMemoryError where they exceed ``limit``.

    Gradients are autograd's own, and the two buffers by which ``fully_shard`` brings a group's gradients to the host.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.live, self.peak, self.limit = dict[int, int](), 0, limit
        groups: list[FSDPParamGroup] = []
        allocate, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage
        post_backward, init = FSDPParamGroup.post_backward, FSDPParamGroup.__init__

        def allocated(x: Tensor) -> None:
            allocate(x)
            self.live[x.untyped_storage()._cdata] = x.nbytes
            self.count(gradients())

        def freed(x: Tensor) -> None:
            free(x)
            self.live.pop(x.untyped_storage()._cdata, None)

        def gradients() -> int:
            return sum(map(of_group, groups))

        def of_group(group: FSDPParamGroup) -> int:
            params = [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            return sum(p.grad.nbytes for p in params if p.grad is not None)

        def reduced(group: FSDPParamGroup, *unused: Any) -> None:
            self.count(gradients() + 2 * of_group(group))
            post_backward(group, *unused)

        def noted(group: FSDPParamGroup, *args: Any, **options: Any) -> None:
            init(group, *args, **options)
            groups.append(group)

        for module in (_fsdp_param, _fsdp_param_group):
            monkeypatch.setattr(module, "alloc_storage", allocated)
        monkeypatch.setattr(_fsdp_param, "free_storage", freed)
        monkeypatch.setattr(FSDPParamGroup, "post_backward", reduced)
        monkeypatch.setattr(FSDPParamGroup, "__init__", noted)

    def count(self, gradients: int) -> None:
        self.peak = max(self.peak, sum(self.live.values()) + gradients)
        if self.peak > self.limit:
            raise torch.OutOfMemoryError(f"{self.peak} bytes of {self.limit}")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda limit: Counted(monkeypatch, limit)


@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"step_in_backward": True}], ids=str)
def test_the_device_holds_the_weights_of_few_blocks(counted: Any, changes: dict[str, Any]) -> None:
    """Two blocks' weights, one's gradients and their two buffers, and 4 times what the model has beside blocks."""
    small = Model(blocks=1).to(torch.bfloat16)
    block_bytes, model_bytes = (sum(p.nbytes for p in x.parameters()) for x in (small.blocks[0], small))
    device = counted(10**9)
    techniques = TECHNIQUES.replace(**changes)
    model = model_for(techniques, blocks=12)
    train(model, optimizer_for(model, techniques), techniques, range(2))
    assert not device.live
    assert device.peak <= 5 * block_bytes + 4 * (model_bytes - block_bytes)
    assert device.peak < sum(p.nbytes for p in model.parameters()) / 2


@pytest.mark.usefixtures("can_compile", "fresh_compiler")
@pytest.mark.parametrize("saved_bits", ["exact", pytest.param(8, marks=pytest.mark.long)])
def test_compiled_blocks_have_the_losses_and_no_more_weights_on_the_device(counted: Any, saved_bits: Any) -> None:
    """The losses are those of compiled blocks on the device; the peak of weights there is the peak without compile."""
    device = counted(10**9)
    losses, peaks = [], []
    for compiled, on_host in ((True, None), (False, "layers"), (True, "layers")):
        device.peak = 0
        compile_options = {"compile": True, "saved_bits": saved_bits} if compiled else {}
        techniques = TECHNIQUES.replace(step_in_backward=True, weights_on_host=on_host, **compile_options)
        model = model_for(techniques, blocks=6)
        losses.append(train(model, optimizer_for(model, techniques), techniques, range(2)))
        peaks.append(device.peak)
    assert losses[2] == losses[0]
    assert peaks[2] == peaks[1] > 0


TECHNIQUES_GIVEN = "--precision bf16 --master-weights bf16+8 --clip 0 --checkpointing blocks --loss-chunk 64"
COMMAND = ["train", *small_run_flags(layers=12, batch_size=4, steps=3), *shlex.split(TECHNIQUES_GIVEN), "--save"]


@pytest.mark.full
def test_a_model_of_twice_the_memory_trains(counted: Any, text: Path, tmp_path: Path) -> None:
    """Half the bytes of weights, states and gradients (2 + 3.06 + 2 a parameter) are enough; an eighth is too few."""

    def history(name: str, *arguments: str) -> Any:
        path = tmp_path / name
        main([*COMMAND, str(path), "--data", str(text), *arguments])
        return checkpoints.load(path)

    plain = history("plain.pt")
    model = plain["model"].values()
    needed = 2 * sum(x.nbytes for x in model)  # weights and gradients
    needed += sum(x.nbytes for s in plain["optimizer"]["state"].values() for x in s.values() if isinstance(x, Tensor))
    saved = plain["history"]["saved_bytes"]
    assert saved < needed / 8
    device = counted(needed // 2 - saved)
    for name, arguments in (("streamed.pt", ()), ("backward.pt", ("--step-in-backward",))):
        streamed = history(name, "--weights-on-host", "layers", *arguments)
        assert streamed["history"]["train_loss"] == plain["history"]["train_loss"]
        assert streamed["history"]["validation"] == plain["history"]["validation"]
    assert 0 < device.peak <= device.limit
    device.limit //= 8
    with pytest.raises(torch.OutOfMemoryError):
        history("less.pt", "--weights-on-host", "layers")
