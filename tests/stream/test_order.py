"""Weights on the host: copies, uses and frees of weights and gradients have no races, on simulated CUDA streams.

Copies of weights are noted in the stream that runs them, uses in the computing stream. A free gives memory back to the
stream that allocated it, and that stream's next copy takes it. A gradient is written by the stream ``down`` and read
by the host's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from memkern.optim.arrivals import Arrivals
from memkern.stream.prefetch import Prefetch
from memkern.stream.streaming import StreamedModel
from memkern.techniques.options import Techniques
from tests.stream.runs import STREAMED as TECHNIQUES
from tests.stream.runs import Model, model_for, optimizer_for, train
from tests.support.streams import Event, RaceError, Stream, Streams

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="the stand-in notes what fully_shard of torch 2.13 calls"
)


class Device(Streams):
    """Streams of the device and of the host, and the memory of each group of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Stream(self, "host")
        self.free: dict[str, list[int]] = {}  # memory by the stream that it was allocated in
        self.allocations = 0
        self.resident: dict[Any, tuple[str, int]] = {}  # for each group on the device: the stream, and the memory
        self.peak = 0  # groups on the device
        self.events: list[tuple[str, str, str]] = []  # action (copy, free, forward, backward), group, stream

    def allocate(self, group: Any) -> None:
        name = self.now.name
        pool = self.free.setdefault(name, [])
        if not pool:
            self.allocations += 1
            pool.append(self.allocations)
        self.resident[group] = name, pool.pop()
        self.peak = max(self.peak, len(self.resident))
        self.events.append(("copy", group._module_fqn, name))
        self.access([self.resident[group]], True, f"a copy of {group._module_fqn}")

    def release(self, group: Any) -> None:
        if group in self.resident:
            name, memory = self.resident.pop(group)
            self.events.append(("free", group._module_fqn, name))
            self.free[name].append(memory)

    def use(self, group: Any, action: str) -> None:
        self.events.append((action, group._module_fqn, self.now.name))
        self.access([self.resident[group]], False, f"{action} of {group._module_fqn}")


class _NotesBackward(torch.autograd.Function):
    """Notes the backward pass of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grad, None


@pytest.fixture
def streamed_models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the StreamedModels that a test makes."""
    collected: list[Any] = []
    init = StreamedModel.__init__

    def collecting(self: StreamedModel, *args: Any) -> None:
        collected.append(self)
        init(self, *args)

    monkeypatch.setattr(StreamedModel, "__init__", collecting)
    return collected


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, streamed_models: list[Any]) -> Device:
    """A Device that notes when fully_shard copies, frees and reduces."""
    stand_in = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: stand_in)
    wait, to_sharded, post_backward = (
        FSDPParamGroup.wait_for_unshard, FSDPParamGroup._to_sharded, FSDPParamGroup.post_backward,
    )  # fmt: skip

    def wait_for_unshard(group: FSDPParamGroup) -> None:
        if group._all_gather_result and not group.is_unsharded:
            stand_in.allocate(group)
        wait(group)

    def sharded(group: FSDPParamGroup) -> None:
        stand_in.release(group)
        to_sharded(group)

    def reduced(group: FSDPParamGroup, *unused: Any) -> None:
        post_backward(group, *unused)
        with stand_in.stream(streamed_models[-1].down):
            for p in (p.sharded_param for p in group.fsdp_params):
                if p.grad is not None:
                    stand_in.access([("gradient", id(p))], True, "a copy of a gradient")

    monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", wait_for_unshard)
    monkeypatch.setattr(FSDPParamGroup, "_to_sharded", sharded)
    monkeypatch.setattr(FSDPParamGroup, "post_backward", reduced)
    return stand_in


def trained(device: Device, techniques: Techniques = TECHNIQUES, steps: int = 3) -> Model:
    """Trains a model whose layers note when their forward and backward passes use their weights."""
    device.names = iter(("down", "up"))
    model = model_for(techniques)
    for module in (model.embedding, *model.blocks, model.head):
        group = module._get_fsdp_state()._fsdp_param_groups[0]  # type: ignore[operator, union-attr]
        inner = module.forward

        def forward(x: torch.Tensor, inner: Any = inner, group: Any = group) -> torch.Tensor:
            device.use(group, "forward")
            out = inner(x)
            if isinstance(group.modules[0], torch.nn.Embedding):
                return out  # needs no weights in the backward pass
            return _NotesBackward.apply(out, lambda: device.use(group, "backward"))

        module.forward = forward
    optimizer = optimizer_for(model, techniques)
    train(model, optimizer, techniques, range(steps))
    return model


NAMES = ["embedding", *(f"blocks.{i}" for i in range(4)), "head"]


def test_a_group_is_copied_while_the_one_before_computes(device: Device) -> None:
    trained(device)
    events = device.events
    step = events[max(i for i, event in enumerate(events) if event == ("copy", "embedding", "up")) :]  # the last
    middle = step.index(("backward", "head", "compute"))
    forward, backward = step[:middle], step[middle - 1 :]  # the copy of the last block is before the head's pass
    for before, name in itertools.pairwise(NAMES):
        uses = [forward.index(("forward", x, "compute")) for x in (before, name)]
        assert forward.index(("copy", name, "up")) < uses[0] < uses[1]
    for name, after in itertools.pairwise(NAMES[1:]):
        uses = [backward.index(("backward", x, "compute")) for x in (after, name)]
        assert backward.index(("copy", name, "up")) < uses[0] < uses[1] < backward.index(("free", name, "up"))
    assert ("copy", "embedding", "up") not in backward
    assert device.peak <= 4  # the root, the head, and two blocks
    assert not device.resident  # all are on the host after a step


def test_nothing_is_used_before_its_copy_or_written_while_it_is_used(device: Device) -> None:
    for changes in ({}, {"checkpointing": "blocks"}, {"accumulation": 2}):
        trained(device, TECHNIQUES.replace(**changes))


# ---- gradients


def note_steps(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes that the host reads the gradients that it steps by."""
    step_by = Arrivals._step

    def noted(step: Any, pairs: Any) -> None:
        device.access([("gradient", id(p)) for p, _ in pairs], False, "a step", device.host)
        step_by(step, pairs)

    monkeypatch.setattr(Arrivals, "_step", staticmethod(noted))


def test_a_block_is_stepped_after_its_gradients_have_come(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    note_steps(device, monkeypatch)
    trained(device, TECHNIQUES.replace(step_in_backward=True))


@pytest.mark.parametrize(
    ("owner", "wait", "message"),
    [
        (Prefetch, "wait_for_copy", "forward of embedding of compute, and before it a copy of embedding of up"),
        (Stream, "wait_stream", r"a copy of blocks\.\d of up, and before it forward of .* of compute"),
        (Event, "synchronize", "a step of host, and before it a copy of a gradient of down"),
    ],
    ids=["of a copy", "of the last use of the memory", "of a gradient"],
)
def test_a_wait_that_is_left_out_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, owner: type, wait: str, message: str
) -> None:
    note_steps(device, monkeypatch)
    monkeypatch.setattr(owner, wait, lambda self, other=None: None)
    with pytest.raises(RaceError, match=message):
        trained(device, TECHNIQUES.replace(step_in_backward=True))


def test_gradients_are_copied_in_the_stream_down(monkeypatch: pytest.MonkeyPatch, streamed_models: list[Any]) -> None:
    """As on a GPU: fully_shard gives the copies to ``down``, and the memory that they read is marked for it."""
    marked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: marked.append(x), raising=False)

    def trained_by(copies_down: bool) -> list[float]:
        model = model_for(TECHNIQUES)
        streamed = streamed_models[-1]
        if copies_down:
            for group in (*streamed.groups, streamed.root):
                streamed._copy_down(group)
        losses = train(model, optimizer_for(model, TECHNIQUES), TECHNIQUES, range(2))
        groups = [
            g._get_fsdp_state()._fsdp_param_groups[0] for g in (model.embedding, *model.blocks, model.head, model)
        ]
        assert all((g._all_reduce_hook_stream is streamed.down) is copies_down for g in groups)
        return losses

    assert trained_by(True) == trained_by(False)
    assert len(marked) == 2 * 7  # steps, and groups: embedding, four blocks, head, the model's own
