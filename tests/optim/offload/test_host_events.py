"""HostOffload with steps on the CPU: the order of copies, events and steps, and what memory it takes."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

from memkern import memory, optim
from memkern.optim import HostOffload
from memkern.optim.offload.transfers import StreamTransfers, Transfers, transfers_of
from tests.support.helpers import assert_same
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import MODES, events_of_a_step, model_of

# ---- the order of events


def log_of_a_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events of a step (:func:`events_of_a_step`) and when the CPU steps a bucket. Each matrix has a bucket."""
    log: list[Any] = []
    step = HostOffload._step_inner
    monkeypatch.setattr(HostOffload, "_step_inner", lambda self, bucket: (log.append("CPU steps"), step(self, bucket)))
    return events_of_a_step(MODES[mode], log)


def test_the_next_bucket_comes_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next bucket's weights and gradients come while the CPU steps a bucket, and the weights before it go back."""
    assert log_of_a_step("default", monkeypatch) == [
        "backward is over",
        *(("down", i) for i in range(4)),
        ("host waits", "down", 1),
        "CPU steps",
        ("up", 0),
        ("down", 4),
        ("down", 5),
        ("host waits", "down", 3),
        "CPU steps",
        ("up", 1),
        ("host waits", "down", 5),
        "CPU steps",
        ("up", 2),
        *(("device waits", "up", i) for i in range(3)),
        "step is over",
    ]


def test_gradients_come_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of_a_step("offload_gradients", monkeypatch)
    over = log.index("backward is over")
    assert log[:over] == [("down", i) for i in range(3)]
    assert log[over + 1 :] == [  # in step() the weights come: copies 3 to 5 to the host
        ("down", 3),
        ("down", 4),
        *(("host waits", "down", 3), "CPU steps", ("up", 0)),
        ("down", 5),
        *(e for i in (1, 2) for e in (("host waits", "down", 3 + i), "CPU steps", ("up", i))),
        *(("device waits", "up", i) for i in range(3)),
        "step is over",
    ]


def test_copies_of_a_device_wait_for_each_other_by_streams_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    module, names, numbers = MagicMock(), iter(("down", "up")), itertools.count()
    module.Stream.side_effect = lambda device: getattr(module, next(names))
    module.Event.side_effect = lambda: getattr(module, f"event_{next(numbers)}")
    module.current_stream.return_value = module.compute
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: module.record(stream))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: (module.pin(), x)[1])
    transfers = transfers_of(torch.device("cuda", 0))
    assert isinstance(transfers, StreamTransfers)
    assert not transfers.shares_memory
    x, y = torch.randn(3), torch.zeros(3)
    host = transfers.empty_like(x)
    down = transfers.to_host(host, x)
    transfers.host_waits(down)
    up = transfers.to_device(y, host, down)
    transfers.device_waits(up)
    assert_same(y, x)
    lookups = ("Stream", "Event", "current_stream", "stream().__enter__", "stream().__exit__")
    assert [called for called in module.mock_calls if called[0] not in lookups] == [
        call.pin(),
        call.event_0.record(module.compute),
        call.down.wait_event(module.event_0),
        call.stream(module.down),
        call.record(module.down),
        call.event_1.record(module.down),
        call.event_1.synchronize(),
        call.up.wait_event(module.event_1),
        call.stream(module.up),
        call.record(module.up),
        call.event_2.record(module.up),
        call.compute.wait_event(module.event_2),
    ]


def test_transfers_of_the_cpu_are_plain_copies() -> None:
    transfers = transfers_of(torch.device("cpu"))
    assert type(transfers) is Transfers
    assert transfers.shares_memory


# ---- memory


def test_offloaded_gradients_are_freed() -> None:
    model = model_of()
    optimizer = LateHostOffload(optim.AdamW, model.parameters(), offload_gradients=True)
    model(torch.randn(8, 16)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()


def test_on_the_cpu_nothing_is_copied() -> None:
    model = model_of()
    optimizer = HostOffload(optim.AdamW, model.parameters())
    for w in optimizer._weights.values():
        assert w.host_param.data_ptr() == w.p.data_ptr()
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    weight_bytes = sum(p.nbytes for p in model.parameters())  # and as many of gradients
    allowance = 1024  # bytes, of small temporaries
    peak = memory.peak_bytes(optimizer.step, model, optimizer)
    assert peak <= memory.optimizer_bytes(optimizer) + 2 * weight_bytes + allowance
