"""Saved tensors on the host: the same bits, the order of copies and events, what is on the device and on the host."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import memkern
from memkern import memory
from memkern.saved import offload
from memkern.saved.host_pool import HostPool
from memkern.saved.link import Link
from tests.support.streams import RaceError, Streams, WatchedLink

from .helpers import WIDTH, Model, gradients, ids, same

BITS = ["exact", 8]


@pytest.fixture(autouse=True)
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkern.saved.link.LEAST_BYTES", 4096)
    monkeypatch.setattr(offload, "_links", {})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedLink]:
    """The CPU's link, as if the CPU were a device with streams."""
    link = WatchedLink(Streams())
    monkeypatch.setitem(offload._links, torch.device("cpu"), link)
    yield link
    gc.collect()
    assert link.streams.errors == []


def saved(model: nn.Module, bits: Any, run: Callable[[], Tensor] | None = None, **options: Any) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with memkern.quantize_saved(bits, **options):
            return run() if run else model(ids())

    return forward


def nothing_is_left() -> None:
    gc.collect()
    assert memory.offload_bytes().used == 0
    for link in offload._links.values():
        link.note_dead()
        assert (link.live, link.staying_bytes) == (0, 0)


# ---- the same bits


@pytest.mark.parametrize("ahead", [None, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 50_000))])
@pytest.mark.parametrize("bits", BITS)
def test_gradients_have_the_same_bits(watched: WatchedLink, bits: Any, ahead: int | None) -> None:
    model = Model(6)
    expected = gradients(model, saved(model, bits))
    for _ in range(2):
        assert same(gradients(model, saved(model, bits, offload=True, offload_ahead=ahead)), expected)
        nothing_is_left()
    assert {"down", "up"} <= {way for way, _ in watched.log}


@pytest.mark.parametrize("bits", BITS)
def test_compress(watched: WatchedLink, bits: Any) -> None:
    model = Model(6)
    memkern.compress(model, saved_bits=bits)
    expected = gradients(model, lambda: model(ids()))
    report = memkern.compress(model, saved_bits=bits, offload=True)
    assert "on the host" in str(report)
    for _ in range(2):
        assert same(gradients(model, lambda: model(ids())), expected)
    assert {"down", "up"} <= {way for way, _ in watched.log}
    assert watched.options == (None, 6)
    watched.log.clear()
    memkern.compress(model, saved_bits=bits)
    assert same(gradients(model, lambda: model(ids())), expected)
    assert watched.log == []


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpoints(watched: WatchedLink, reentrant: bool, bits: Any) -> None:
    model = Model(8)

    def run() -> Tensor:
        x = model.embed(ids())
        for layer in model.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        return model.head(x)

    expected = gradients(model, saved(model, bits, run))
    found = gradients(model, saved(model, bits, run, offload=True, offload_ahead=0))
    assert same(found, expected)
    assert sum(way == "down" for way, _ in watched.log) >= 5
    nothing_is_left()


@pytest.mark.parametrize("bits", BITS)
def test_two_backward_passes_through_one_graph(watched: WatchedLink, bits: Any) -> None:
    model = Model(4)

    def twice(forward: Callable[[], Tensor]) -> list[dict[str, Tensor]]:
        model.zero_grad()
        loss = forward().float().square().mean()
        found = []
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return found

    expected = twice(saved(model, bits))
    found = twice(saved(model, bits, offload=True, offload_ahead=10_000))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    nothing_is_left()


@pytest.mark.parametrize("order", ["together", *(pytest.param(o, marks=pytest.mark.full) for o in [(0, 1), (1, 0)])])
@pytest.mark.parametrize("bits", BITS)
def test_two_forward_passes_before_a_backward_pass(watched: WatchedLink, bits: Any, order: Any) -> None:
    model = Model(4)
    batches = [torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(n)) for n in (128, 96)]

    def both(**options: Any) -> dict[str, Tensor]:
        model.zero_grad()
        losses = []
        for batch in batches:
            with memkern.quantize_saved(bits, **options):
                losses.append(model(batch).square().mean())
        if order == "together":
            (losses[0] + losses[1]).backward()
        else:
            for i in order:
                losses[i].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = both()
    assert same(both(offload=True), expected)
    assert same(both(offload=True, offload_ahead=0), expected)
    nothing_is_left()


@pytest.mark.parametrize("bits", BITS)
def test_an_exception_in_the_forward_pass(watched: WatchedLink, bits: Any) -> None:
    model = Model(4)
    expected = gradients(model, saved(model, bits))

    def fail(*_: Any) -> None:
        raise KeyError("planted")

    for last in (1, 3):
        handle = model.layers[last].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="planted"):
            saved(model, bits, offload=True, offload_ahead=10_000)()
        handle.remove()
        nothing_is_left()
    assert same(gradients(model, saved(model, bits, offload=True, offload_ahead=10_000)), expected)


@pytest.mark.parametrize("bits", BITS)
def test_an_exception_in_the_backward_pass(watched: WatchedLink, bits: Any) -> None:
    model = Model(4)
    expected = gradients(model, saved(model, bits))
    forward = saved(model, bits, offload=True, offload_ahead=10_000)

    def fail(grad: Tensor) -> None:
        raise KeyError("planted")

    out = forward()
    handle = model.layers[2].qkv.weight.register_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        out.square().mean().backward()
    handle.remove()
    del out  # torch holds the graph of a pass that raised until the next one
    assert same(gradients(model, forward), expected)
    nothing_is_left()


def test_a_part_of_the_gradients(watched: WatchedLink) -> None:
    model = Model(4)
    weight = model.layers[2].down.weight
    (expected,) = torch.autograd.grad(saved(model, 8)().square().mean(), weight)
    out = saved(model, 8, offload=True, offload_ahead=10_000)().square().mean()
    for retain in (True, False):
        (found,) = torch.autograd.grad(out, weight, retain_graph=retain)
        assert torch.equal(found, expected)
    del out
    nothing_is_left()


def test_a_change_in_place_raises_as_without(watched: WatchedLink) -> None:
    x = torch.randn(64, WIDTH, requires_grad=True)
    y = x * 2
    with memkern.quantize_saved("exact", offload=True, offload_ahead=0):
        z = y.cos()
        w = z.sin() + torch.randn(64, WIDTH).requires_grad_().cos()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()


def test_what_the_model_holds_does_not_leave(watched: WatchedLink) -> None:
    """Frozen weights and buffers: a copy would free nothing."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).requires_grad_(False)
    model.register_buffer("scale", torch.randn(128, WIDTH))
    x = torch.randn(128, WIDTH, requires_grad=True)
    with memkern.quantize_saved("exact", offload=True, offload_ahead=0):
        y = x * model.scale
        for layer in model:
            y = layer(y)
    y.sum().backward()
    assert "down" not in {way for way, _ in watched.log}


def test_hooks_around_the_block_win(watched: WatchedLink) -> None:
    model = Model(3)
    expected = gradients(model, saved(model, 8))
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model, saved(model, 8, offload=True)), expected)
    assert watched.log == []


# ---- the order of copies


def of_48_blocks(link: WatchedLink, bits: Any = 8, **options: Any) -> None:
    torch.manual_seed(0)
    model = Model(48)
    memkern.compress(model, saved_bits=bits, offload=True, **options)
    for _ in range(2):
        link.log.clear()
        link.most_early = link.most_on_device = link.missed = 0
        model(ids()).square().mean().backward()


def test_48_blocks(watched: WatchedLink) -> None:
    """In the second step: the newest stay, the others go in order and come back in the opposite order, in time."""
    of_48_blocks(watched)
    went = [i for way, i in watched.log if way == "down"]
    came = [i for way, i in watched.log if way == "up"]
    total, block = watched.most_before, watched.ahead
    direct = [i for i in went if i not in watched.held_numbers]
    assert direct == sorted(direct)
    assert {*came} <= {*went}
    assert len(came) == len({*came})
    assert came == sorted(came, reverse=True)
    # What comes is sent for before it is asked for; on the CPU the forward pass looks at some tensors, too.
    asked = {entry: at for at, entry in enumerate(watched.log)}
    assert all(watched.log.index(("up", i)) < asked["take", i] for i in came)
    # A block's bytes never leave; as many are on their way at the turn, and stay if they are still there.
    size = {i: record.nbytes for record, i in watched.numbers.items()}
    assert total / 48 - max(size.values()) <= block <= total / 48
    assert 0 < total - sum(size[i] for i in went) <= 1.5 * block
    # Bounded: a block early, two blocks in all, one tensor more of each.
    largest = max(size.values())
    assert watched.most_early <= block + largest
    assert watched.most_on_device <= 2 * block + 2 * largest
    assert watched.missed == 0


@pytest.mark.full
def test_no_more_host_memory_than_what_leaves(watched: WatchedLink) -> None:
    of_48_blocks(watched)
    one_step = memory.offload_bytes()
    assert one_step.used == 0
    left = sum({i: r.nbytes for r, i in watched.numbers.items()}[i] for way, i in watched.log if way == "down")
    assert left <= one_step.total <= 1.05 * left + 2**20
    model = Model(48)
    memkern.compress(model, saved_bits=8, offload=True)
    for tokens in (128, 120, 100, 127):  # other lengths need no more than the longest
        model(ids(tokens=tokens)).square().mean().backward()
    assert memory.offload_bytes().total == one_step.total
    assert memory.empty_offload_pool() == one_step.total
    assert memory.offload_bytes() == (0, 0)


class NoWaitBeforeUse(WatchedLink):
    """A tensor that has come back is read before its copy has ended."""

    def take(self, record: Any) -> Any:
        self.copies.wait, wait = lambda event: None, self.copies.wait
        try:
            return super().take(record)
        finally:
            self.copies.wait = wait


class FreedAtOnce(WatchedLink):
    """The device's memory is freed while the copy to the host reads it."""

    def _free_what_left(self, ahead: int) -> None:
        while self.leaving:
            self._free(self.leaving.popleft())


class ReusedAtOnce(WatchedLink):
    """The host's memory is written again while the copy to the device reads it."""

    def _fetch(self, records: Any) -> None:
        super()._fetch(records)
        (host,) = records[-1].hosts[:1]
        with self.streams.stream(self.copies._down):
            self.copies._copy([(host, torch.zeros_like(host))])


class DownBeforeItIsThere(WatchedLink):
    """A copy to the host reads what the computing stream has not yet made."""

    def _send(self, ahead: int) -> None:
        self.copies.stream, stream = lambda: self.copies._down, self.copies.stream
        try:
            super()._send(ahead)
        finally:
            self.copies.stream = stream


@pytest.mark.full
@pytest.mark.parametrize(
    "planted",
    [NoWaitBeforeUse, FreedAtOnce, ReusedAtOnce, DownBeforeItIsThere],
    ids=lambda c: c.__name__,
)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, planted: type[WatchedLink]) -> None:
    link = planted(Streams())
    monkeypatch.setitem(offload._links, torch.device("cpu"), link)
    with contextlib.suppress(RaceError):
        of_48_blocks(link)
        gc.collect()
        raise link.streams.errors[0]  # IndexError where nothing was found
    link.streams.errors.clear()


# ---- where memory ends


class OutOfMemory(WatchedLink):
    """Allocations on the device or on the host fail while ``fails`` says so."""

    fails = ""

    def _empty(self, record: Any) -> Any:
        if self.fails == "device":
            raise torch.OutOfMemoryError("planted")
        return super()._empty(record)

    def _find_host_memory(self, record: Any, leave: Any) -> None:
        if self.fails == "host" and len(self.stack) > 9 and leave:
            raise RuntimeError("planted")
        super()._find_host_memory(record, leave)


@pytest.fixture
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[OutOfMemory]:
    link = OutOfMemory(Streams())
    monkeypatch.setitem(offload._links, torch.device("cpu"), link)
    yield link
    gc.collect()
    assert link.streams.errors == []


@pytest.mark.parametrize("bits", BITS)
def test_no_memory_on_the_device(out_of_memory: OutOfMemory, bits: Any) -> None:
    """What comes early is left; what is asked for raises, and a later backward pass finds what was saved."""
    model = Model(6)
    forward = saved(model, bits, offload=True, offload_ahead=20_000)
    expected = gradients(model, forward)
    out = forward().float().square().mean()
    out_of_memory.fails = "device"
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        out.backward(retain_graph=True)
    out_of_memory.fails = ""
    model.zero_grad()
    out.backward()
    assert same({name: p.grad for name, p in model.named_parameters()}, expected)
    del out
    nothing_is_left()


def test_no_memory_on_the_device_for_what_comes_early(
    out_of_memory: OutOfMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(6)
    forward = saved(model, 8, offload=True, offload_ahead=20_000)
    expected = gradients(model, forward)
    fetch = out_of_memory._fetch_below

    def without_memory(record: Any) -> None:
        out_of_memory.fails = "device"
        fetch(record)
        out_of_memory.fails = ""

    monkeypatch.setattr(out_of_memory, "_fetch_below", without_memory)
    assert same(gradients(model, forward), expected)
    assert out_of_memory.missed > 5
    nothing_is_left()


def test_no_memory_on_the_host(out_of_memory: OutOfMemory) -> None:
    model = Model(6)
    forward = saved(model, 8, offload=True, offload_ahead=20_000)
    expected = gradients(model, forward)
    out_of_memory.fails = "host"
    with pytest.raises(RuntimeError, match="planted"):
        forward()
    out_of_memory.fails = ""
    nothing_is_left()
    assert same(gradients(model, forward), expected)
    nothing_is_left()


def test_a_pool_without_memory() -> None:
    slabs = [bytearray(2**21)]
    pool = HostPool(lambda size: slabs.pop())
    with pytest.raises(IndexError):
        pool.take(2**21 + 2**19)
    assert (pool.used, pool.total, pool.most) == (0, 2**21, 0)
    assert sum(piece.size for piece in pool.take(2**21)) == 2**21


def test_nothing_leaves_into_a_graph(watched: WatchedLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream is captured, nobody can ask whether an event is complete."""
    model = Model(4)
    monkeypatch.setattr(watched.copies, "_is_capturing", lambda: True)
    gradients(model, saved(model, 8, offload=True, offload_ahead=0))
    assert watched.log == []


# ---- host memory


def test_pieces_of_the_pool() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = HostPool(bytearray)
    live: list[Any] = []
    most = 0
    for _ in range(2000):
        if live and torch.rand((), generator=generator) < 0.5:
            pool.give(live.pop(int(torch.randint(len(live), (), generator=generator))))
        else:
            size = int(torch.randint(1, 3 * 2**20, (), generator=generator))
            live.append(pool.take(size))
            assert sum(piece.size for piece in live[-1]) >= size
        most = max(most, pool.used)
        spans = sorted(piece for pieces in live for piece in pieces)
        assert all(a.slab != b.slab or a.start + a.size <= b.start for a, b in itertools.pairwise(spans))
        assert all(piece.start + piece.size <= len(pool.slabs[piece.slab]) for piece in spans)
        assert pool.used == sum(piece.size for piece in spans)
    assert pool.total <= 1.1 * most + 2**20
    for pieces in live:
        pool.give(pieces)
    assert pool.used == 0
    assert pool.empty() > 0
    assert pool.total == len(pool.slabs) == len(pool._gaps) == 0


# ---- errors


def test_options() -> None:
    model = Model(2)
    for call in (
        lambda **o: memkern.quantize_saved(8, **o),
        lambda **o: memkern.compress(model, saved_bits=8, **o),
    ):
        with pytest.raises(ValueError, match="offload must be True or False, got 'cpu'"):
            call(offload="cpu")
        for wrong in (-1, 0.5, True):
            with pytest.raises(ValueError, match="offload_ahead must be None or a number of bytes, 0 or more"):
                call(offload=True, offload_ahead=wrong)
        with pytest.raises(ValueError, match="offload_ahead is for offload=True"):
            call(offload_ahead=100)
    with pytest.raises(ValueError, match="offload is for what saved_bits stores"):
        memkern.compress(model, offload=True)
    assert memkern.restore(model) == 0


def test_the_options_stay_with_the_model() -> None:
    import copy

    from memkern.saved import hooks

    model = Model(3)
    memkern.compress(model, saved_bits=8, offload=True, offload_ahead=5000)
    expected = [("", 8, (5000, 3))]
    assert hooks.state_of(copy.deepcopy(model)) == expected
    memkern.restore(model)
    assert hooks.state_of(model) == []
    assert not [name for module in model.modules() for name in vars(module) if "memkern" in name]


def test_a_link_of_each_device() -> None:
    assert offload.link_of(torch.zeros(2)) is offload.link_of(torch.zeros(3))
    assert isinstance(offload.link_of(torch.zeros(2)), Link)
