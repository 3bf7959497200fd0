"""Counts what a step of a model with weights on the host allocates on a device: FSDP2's own code on fake CUDA tensors.

For a process of its own with fake CUDA (``fake_cuda.call``), where streams and events do nothing. A buffer counts from
its allocation to its release by the host, as in torch's caching allocator. A buffer of gradients that another stream
copies to the host counts until the next buffer's copy begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

from memkern.memory import LiveBytes, _storages
from memkern.nn import LinearCrossEntropy
from memkern.planner import fake_step
from memkern.planner.fake_mode import FakeMode
from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import Predictor
from memkern.planner.values import Values
from memkern.stream import streaming
from memkern.techniques import applying
from memkern.techniques.options import Techniques


class DeviceBytes(LiveBytes):
    """LiveBytes of storages on the device alone, which FSDP2 empties and fills again."""

    largest: list[int]
    """Sizes of the largest storages that are alive at the peak."""

    def __init__(self) -> None:
        self.copied: list[Tensor] = []
        super().__init__(counted=False)

    def _track(self, tensors: Any, counted: bool) -> None:
        before = self.peak
        super()._track([x for x in tensors if isinstance(x, Tensor) and x.device.type == "cuda"], counted)
        self._note(before)

    def _note(self, before: int) -> None:
        """Remembers the sizes of what is alive at the peak."""
        if self.peak > before:
            self.largest = sorted((e.size for _, e in self._known.values() if e is not None), reverse=True)[:40]

    def resize(self, x: Tensor, size: int) -> None:
        before = self.peak
        for storage in _storages((x,)):
            entry = self._known.get(storage._cdata, (None, None))[1]
            if entry is not None:
                self.live += size - entry.size
                entry.size = size
        self.peak = max(self.peak, self.live)
        self._note(before)


class Ignored(mock.MagicMock):
    """A stream or an event, whose methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


@contextlib.contextmanager
def counting(live: DeviceBytes) -> Iterator[None]:
    """In this context ``live`` counts the storages that FSDP2 resizes, and streams and events do nothing."""
    current = Ignored()

    def free(x: Tensor) -> None:
        x.untyped_storage().resize_(0)
        live.resize(x, 0)

    def alloc(x: Tensor) -> None:
        size = x.numel() * x.element_size()
        if x.untyped_storage().size() != size:
            x.untyped_storage().resize_(size)
        live.resize(x, size)

    @contextlib.contextmanager
    def use_stream(stream: Any) -> Iterator[None]:
        yield

    def record_stream(x: Tensor, stream: Any) -> None:
        live.copied[:] = [x]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
        for name, value in (
            ("Stream", Ignored),
            ("Event", Ignored),
            ("current_stream", lambda *_: current),
            ("stream", use_stream),
            ("current_device", lambda: 0),
            ("set_device", lambda *_: None),
            ("synchronize", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", return_value=current))
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        for module in (_fsdp_param, _fsdp_param_group):
            if hasattr(module, "free_storage"):
                stack.enter_context(mock.patch.object(module, "free_storage", free))
            stack.enter_context(mock.patch.object(module, "alloc_storage", alloc))
        yield


class WithLoss(nn.Module):
    """What is streamed: a language model and its loss, in chunks of ``chunk`` classes where it is given."""

    def __init__(self, model: Any, source: Any, chunk: int | None) -> None:
        super().__init__()
        self.model, self.source, self.chunk = model, source, chunk
        if chunk:
            self.loss = LinearCrossEntropy.from_linear(model.get_output_embeddings(), chunk_size=chunk)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.chunk:
            return self.source.loss(self.model, batch)
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        hidden = self.model.base_model(**inputs).last_hidden_state
        return self.loss(hidden[:, :-1], batch["labels"][:, 1:])


def peak_of_a_step(source: Any, techniques: Techniques) -> dict[str, int]:
    """Peak bytes of the forward and the backward pass of a second step; the optimizer's step is on the host."""
    live, mode = DeviceBytes(), FakeMode()
    values, device = Values(mode), torch.device("cuda", 0)
    with mode, device:
        model = source.empty(applying.weight_dtype(techniques))
    applying.apply(model, techniques.replace(weights_on_host=None))
    step = WithLoss(model, source, techniques.loss_chunk)
    with counting(live):
        streaming.process_group()
        mesh = init_device_mesh("cuda", (1,))  # looks at values, which fake tensors do not have
        with mock.patch.object(streaming, "init_device_mesh", return_value=mesh), mode:
            streaming.stream(step, device, pin_memory=False)
        with mode, device:
            mode.around = values.around
            batch = source.batch(techniques.micro_batch)
        peaks = {}
        with fake_step._as_on_real_tensors(), mode.inside(live.around), mode:
            for _ in range(2):
                live.peak = live.live
                loss = step(batch)
                peaks["forward"], live.peak = live.peak, live.live
                loss.backward()
                peaks["backward"] = live.peak
                del loss
                step.zero_grad()
                live.copied.clear()
    return peaks


def predicted_and_counted(
    model: Any, tokens: int, techniques: Techniques, depth: int | None = None
) -> dict[str, tuple[int, int]]:
    """By pass: the peak bytes that the planner predicts, without the process's own, and those of peak_of_a_step."""
    source: Any = resolve(model, tokens, None, None, 0.0)
    source = source.with_depth(depth) if depth else source
    predictor = Predictor(source, "cuda", "cuda", DEFAULTS["cuda"])
    phases = predictor.predict(techniques).phases
    peaks = peak_of_a_step(source, techniques)
    return {name: (phases[name] - DEFAULTS["cuda"].process, peaks[name]) for name in ("forward", "backward")}
