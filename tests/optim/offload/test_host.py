"""HostOffload: the bits of the step in memory, the order of events, what stays on the device, what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from memkern import memory, optim
from memkern.optim import HostOffload
from memkern.optim.offload import host
from memkern.optim.offload.transfers import StreamTransfers, Transfers, transfers_of
from tests.support.generic_optimizers import saved
from tests.support.helpers import OPTIMIZERS, assert_same, name_of, snapshot
from tests.support.late_transfers import LateTransfers

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "offload_gradients": {"offload_gradients": True},
    "step_in_backward": {"step_in_backward": True},
}
over_modes = pytest.mark.parametrize("mode", MODES)
over_transfers = pytest.mark.parametrize("transfers", [transfers_of, LateTransfers], ids=["cpu", "late"])
TORCH = [torch.optim.AdamW, torch.optim.SGD]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has several."""
    monkeypatch.setattr(host, "BUCKET_ELEMENTS", 200)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 5, bias=False)).to(dtype)


def losses(model: nn.Module, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    return [
        model(torch.randn(8, 16, generator=generator).to(dtype)).float().square().mean() for _ in range(count)
    ]


def run(
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
) -> tuple[dict[str, Any], torch.optim.Optimizer, nn.Module]:
    """A loop as a user has it."""
    model = model_of(dtype)
    optimizer = make(model.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(8, 16, generator=generator).to(dtype)
            (model(x).float().square().mean() / micro_batches).backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return snapshot(optimizer), optimizer, model


def options_of(build: type) -> dict[str, Any]:
    return {"lr": 1e-2, "weight_decay": 0.1, **({"min_8bit_size": 0} if build in OPTIMIZERS else {})}


# ---- the same result


@pytest.mark.parametrize("build", [*OPTIMIZERS, *TORCH], ids=name_of)
def test_has_the_bits_of_the_step_in_memory(build: type) -> None:
    options = options_of(build)
    expected, _, _ = run(lambda params: build(params, **options))
    found, _, _ = run(lambda params: HostOffload(build, params, transfers=LateTransfers, **options))
    assert_same(found, expected)


@over_modes
@over_transfers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_every_way_of_offloading(mode: str, transfers: Any, dtype: torch.dtype) -> None:
    expected, _, _ = run(lambda params: optim.AdamW(params, lr=1e-2), dtype=dtype)
    make = lambda params: HostOffload(optim.AdamW, params, lr=1e-2, transfers=transfers, **MODES[mode])  # noqa: E731
    found, optimizer, _ = run(make, dtype=dtype)
    assert_same(found, expected)
    assert len(optimizer._buckets) > 2


class MixedByHand:
    """The published recipe by hand: a half-precision model, and an optimizer of an fp32 copy."""

    def __init__(self, build: type, params: Any, **options: Any) -> None:
        self.params = [*params]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = build(self.masters, **options)

    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master.data)
            p.grad = None


@over_modes
@over_transfers
@pytest.mark.parametrize(
    "build", [optim.AdamW, optim.AdamW8bit, optim.LAMB8bit, torch.optim.AdamW], ids=name_of
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_a_half_precision_model_with_fp32_weights_on_the_host(
    mode: str, transfers: Any, build: type, dtype: torch.dtype
) -> None:
    options = options_of(build)
    models = [model_of(dtype) for _ in range(2)]
    by_hand = MixedByHand(build, models[0].parameters(), **options)
    optimizer = HostOffload(build, models[1].parameters(), transfers=transfers, **MODES[mode], **options)
    for _ in range(3):
        x = torch.randn(8, 16).to(dtype)
        for model, each in zip(models, (by_hand, optimizer), strict=True):
            model(x).float().square().mean().backward()
            each.step()
        optimizer.zero_grad()
    assert_same([*models[1].parameters()], [*models[0].parameters()])
    states = [dict(optimizer.state[p]) for p in models[1].parameters()]
    in_state = dtype == torch.bfloat16 and build is not torch.optim.AdamW
    homes = [w.host_param for w in optimizer._weights.values()]
    weights = [state.pop("master_weight") for state in states] if in_state else [w.detach() for w in homes]
    assert_same(weights, [w.detach() for w in by_hand.masters])
    assert_same(states, [by_hand.optimizer.state[p] for p in by_hand.masters])


def test_host_dtype_none_keeps_the_parameter_s_own() -> None:
    make = optim.AdamW8bit
    expected, _, _ = run(lambda params: make(params, lr=1e-2), dtype=torch.bfloat16)
    found, _, _ = run(
        lambda params: HostOffload(make, params, host_dtype=None, transfers=LateTransfers, lr=1e-2),
        dtype=torch.bfloat16,
    )
    assert_same(found, expected)


@over_modes
@over_transfers
def test_bf16_weights_that_keep_their_rounding(mode: str, transfers: Any) -> None:
    options = {"master_weights": "bf16+8", "min_8bit_size": 0}
    expected, _, _ = run(lambda params: optim.AdamW8bit(params, **options), dtype=torch.bfloat16)
    own = {"host_dtype": None, "transfers": transfers, **MODES[mode]}
    found, _, _ = run(
        lambda params: HostOffload(optim.AdamW8bit, params, **own, **options), dtype=torch.bfloat16
    )
    assert_same(found, expected)
    del own["host_dtype"]  # master_weights says what the host has
    found, _, _ = run(
        lambda params: HostOffload(optim.AdamW8bit, params, **own, **options), dtype=torch.bfloat16
    )
    assert_same(found, expected)


@over_transfers
@pytest.mark.parametrize("mode", ["default", "offload_gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_accumulation(mode: str, transfers: Any, dtype: torch.dtype) -> None:
    """On the host, too, gradients are added in the parameter's dtype."""
    build = optim.AdamW
    expected, _, _ = run(lambda params: build(params), micro_batches=3, dtype=dtype)
    found, _, _ = run(
        lambda params: HostOffload(build, params, host_dtype=None, transfers=transfers, **MODES[mode]),
        micro_batches=3,
        dtype=dtype,
    )
    assert_same(found, expected)


@over_transfers
@pytest.mark.parametrize("mode", ["default", "offload_gradients"])
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.LARS], ids=name_of)
def test_max_grad_norm(build: type, mode: str, transfers: Any) -> None:
    expected, _, _ = run(lambda params: build(params, max_grad_norm=1e-3))
    make = lambda params: HostOffload(build, params, max_grad_norm=1e-3, transfers=transfers, **MODES[mode])  # noqa: E731
    found, _, _ = run(make)
    assert_same(found, expected)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(found["params"], run(lambda p: build(p))[0]["params"], strict=True)
    )


@over_transfers
def test_torch_s_clipping(transfers: Any) -> None:
    build = optim.AdamW8bit
    expected, _, _ = run(lambda params: build(params), clip=1e-3)
    found, _, _ = run(lambda params: HostOffload(build, params, transfers=transfers), clip=1e-3)
    assert_same(found, expected)


@over_transfers
@pytest.mark.parametrize("build", [optim.AdamW8bit, torch.optim.AdamW], ids=name_of)
def test_grad_scaler(build: type, transfers: Any) -> None:
    results = []
    for offload in (False, True):
        model = model_of()
        params = model.parameters()
        optimizer = HostOffload(build, params, transfers=transfers) if offload else build(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step, x in enumerate(torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(1))):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if step == 2:
                model[0].weight.grad[0, 0] = torch.inf
            if step == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append((snapshot(optimizer), scaler.get_scale()))
        assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    assert_same(results[1], results[0])


def test_a_parameter_without_a_gradient_and_one_that_is_unfrozen() -> None:
    for mode in MODES.values():
        a, b, c = (nn.Parameter(torch.ones(20)) for _ in range(3))
        b.requires_grad_(False)
        optimizer = HostOffload(optim.AdamW, [a, b, c], transfers=LateTransfers, **mode)
        (a.sum() + b.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(a, torch.ones(20))
        assert torch.equal(b, torch.ones(20))
        assert torch.equal(c, torch.ones(20))
        b.requires_grad_()
        for _ in range(2):
            (b.sum() + c.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(b, c)
        assert not torch.equal(b, torch.ones(20))


@over_modes
def test_gradients_set_by_hand(mode: str) -> None:
    a, b = (nn.Parameter(torch.ones(20)) for _ in range(2))
    optimizer = HostOffload(optim.AdamW, [a], transfers=LateTransfers, **MODES[mode])
    plain = optim.AdamW([b])
    for _ in range(2):
        a.grad, b.grad = torch.ones(20), torch.ones(20)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
    assert_same(a, b)


# ---- the order of events


def logged(mode: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What one step of three matrices, each a bucket, calls, after a first one."""
    log: list[Any] = []
    layers = [nn.Linear(20, 20, bias=False) for _ in range(3)]
    optimizer = HostOffload(
        optim.AdamW,
        [layer.weight for layer in layers],
        transfers=lambda device: LateTransfers(device, log),
        **MODES[mode],
    )
    step = HostOffload._step_inner
    monkeypatch.setattr(
        HostOffload, "_step_inner", lambda self, bucket: (log.append("CPU steps"), step(self, bucket))
    )
    x = torch.randn(2, 20)
    for _ in range(2):
        log.clear()
        nn.Sequential(*layers)(x).sum().backward()
        log.append("backward is over")
        optimizer.step()
        log.append("step is over")
        optimizer.zero_grad()
    first = {way: min(e[1] for e in log if e[0] == way) for way in ("down", "up")}
    number = lambda e: (e[0], e[1] - first[e[0]])  # noqa: E731
    return [e if isinstance(e, str) else number(e) if e[0] in first else (e[0], *number(e[1])) for e in log]


def test_events_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients of the next bucket come while one is stepped, and weights of the last one go."""
    assert logged("default", monkeypatch) == [
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
    log = logged("offload_gradients", monkeypatch)
    over = log.index("backward is over")
    assert log[:over] == [("down", i) for i in range(3)]
    assert log[over + 1 :] == [  # in step() the weights come
        ("down", 3),
        ("down", 4),
        *(("host waits", "down", 3), "CPU steps", ("up", 0)),
        ("down", 5),
        *(e for i in (1, 2) for e in (("host waits", "down", 3 + i), "CPU steps", ("up", i))),
        *(("device waits", "up", i) for i in range(3)),
        "step is over",
    ]


def test_the_cpu_steps_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logged("step_in_backward", monkeypatch)
    for i in range(3):
        weight, gradient = ("down", 2 * i), ("down", 2 * i + 1)
        assert log.index(weight) < log.index(gradient) < log.index("backward is over")
        assert log.index(gradient) < log.index(("host waits", *gradient)) < log.index(("up", i))
    assert log[-4:] == [*(("device waits", "up", i) for i in range(3)), "step is over"]
    assert log.count("CPU steps") == 3


def test_the_cpu_steps_before_the_backward_pass_is_over() -> None:
    """The last layer's step is seen by the first one's backward, which waits for it."""
    seen: list[bool] = []
    layers = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False))
    optimizer = HostOffload(optim.AdamW, layers.parameters(), step_in_backward=True)
    last = layers[1].weight
    before = last.detach().clone()

    def look(grad: Tensor) -> None:
        for future in [*optimizer._pending]:
            future.result(timeout=60)
        seen.append(not torch.equal(last, before))

    layers[0].weight.register_hook(look)
    layers(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    assert seen == [True]


class FakeStream:
    """Of a device module: notes what is called on it."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.at}")


class FakeModule:
    """torch.cuda as far as StreamTransfers uses it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names = iter(("down", "up"))
        self.compute = FakeStream("compute", self.log)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(next(self.names), self.log)

    def Event(self) -> Any:
        module = self

        class Event:
            def record(self, stream: FakeStream) -> None:
                self.at = f"{stream.name} {len(module.log)}"
                module.log.append(f"event {self.at}")

            def synchronize(self) -> None:
                module.log.append(f"host waits for {self.at}")

        return Event()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.compute

    def stream(self, stream: FakeStream) -> Any:
        import contextlib

        @contextlib.contextmanager
        def on() -> Any:
            self.log.append(f"copy on {stream.name}")
            yield

        return on()


def test_streams_and_events_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda x, stream: module.log.append(f"recorded on {stream.name}")
    )
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: module.log.append("pinned") or x)
    made = transfers_of(torch.device("cuda", 0))
    assert isinstance(made, StreamTransfers)
    assert not made.shares_memory
    x, y = torch.randn(3), torch.zeros(3)
    room = made.empty_like(x)
    down = made.to_host(room, x)
    made.host_waits(down)
    up = made.to_device(y, room, down)
    made.device_waits(up)
    assert_same(y, x)
    assert module.log == [
        "pinned",
        "event compute 1",
        "down waits for compute 1",
        "copy on down",
        "recorded on down",
        "event down 5",
        "host waits for down 5",
        "up waits for down 5",
        "copy on up",
        "event up 9",
        "compute waits for up 9",
    ]


# ---- memory


@pytest.mark.parametrize("mode", ["offload_gradients", "step_in_backward"])
def test_offloaded_gradients_are_freed(mode: str) -> None:
    model = model_of()
    optimizer = HostOffload(optim.AdamW, model.parameters(), transfers=LateTransfers, **MODES[mode])
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
    states = memory.optimizer_bytes(optimizer)
    assert (
        memory.peak_bytes(optimizer.step, model, optimizer)
        <= states + 2 * sum(p.nbytes for p in model.parameters()) + 1024
    )


# ---- states on the device


@pytest.mark.parametrize(("transfers", "calls"), [(transfers_of, 1), (LateTransfers, 6)], ids=["cpu", "late"])
def test_where_nothing_is_transferred_a_step_is_one_call(transfers: Any, calls: int) -> None:
    """In several it took up to twice as long on a machine whose cores are all taken."""

    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Counted.steps += 1
            return super().step(closure)

    run(lambda p: HostOffload(Counted, p, lr=0.1, transfers=transfers), steps=1)
    assert Counted.steps == calls


def test_the_first_states_stay_on_the_device() -> None:
    model = model_of(torch.bfloat16)
    first = model[0].weight
    room = first.numel() * 12 + 4  # fp32 weight, two moments, step
    optimizer = HostOffload(
        optim.AdamW, model.parameters(), device_state_bytes=room + 3, transfers=LateTransfers
    )
    assert [w.resident for w in optimizer._weights.values()] == [True] + 6 * [False]
    none = HostOffload(optim.AdamW, model.parameters(), device_state_bytes=room - 1, transfers=LateTransfers)
    assert not any(w.resident for w in none._weights.values())


@over_modes
@over_transfers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("room", [4000, None])
def test_where_a_state_is_makes_no_difference(
    mode: str, transfers: Any, dtype: torch.dtype, room: int | None
) -> None:
    def make(room: int | None) -> Callable[[Any], HostOffload]:
        options = {"min_8bit_size": 0, "device_state_bytes": room, "transfers": transfers, **MODES[mode]}
        return lambda params: HostOffload(optim.AdamW8bit, params, **options)

    expected, _, _ = run(make(0), dtype=dtype)
    found, optimizer, _ = run(make(room), dtype=dtype)
    assert_same(found, expected)
    assert any(w.resident for w in optimizer._weights.values())


class Full(optim.AdamW):
    """An optimizer whose device has memory for the states of three parameters."""

    states = 3

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        home = Full.homes.get(id(p))
        if home is not None and home.resident and len(self.state) > Full.states:
            raise torch.OutOfMemoryError("no memory")
        return super()._init_state(p, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@over_transfers
def test_states_go_to_the_host_when_the_device_is_full(transfers: Any, dtype: torch.dtype) -> None:
    def make(params: Any) -> HostOffload:
        optimizer = HostOffload(Full, params, device_state_bytes=None, transfers=transfers)
        Full.homes = {id(w.host_param): w for w in optimizer._weights.values()}
        return optimizer

    expected, _, _ = run(lambda params: HostOffload(optim.AdamW, params), dtype=dtype)
    found, optimizer, _ = run(make, dtype=dtype)
    residents = [w.resident for w in optimizer._weights.values()]
    assert residents[0]
    assert not residents[-1]
    assert residents == sorted(residents, reverse=True)
    assert_same(found, expected)


def test_memory_that_lacks_on_the_host_is_raised() -> None:
    class Broken(optim.AdamW):
        def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
            raise torch.OutOfMemoryError("no memory")

    p = nn.Parameter(torch.ones(5))
    optimizer = HostOffload(Broken, [p])
    p.sum().backward()
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert torch.equal(p, torch.ones(5))


# ---- weights that others change


@over_transfers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_weights_that_are_loaded_into_the_model(transfers: Any, dtype: torch.dtype) -> None:
    _, optimizer, model = run(
        lambda params: HostOffload(optim.AdamW, params, transfers=transfers), dtype=dtype
    )
    kept = [optim.weights.fp32_weight(w.p, optimizer.state[w.p]) for w in optimizer._weights.values()]
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same: fp32 weights keep their bits
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    for _ in range(2):
        losses(model, 1)[0].backward()
        optimizer.step()
        found = [optim.weights.fp32_weight(w.p, optimizer.state[w.p]) for w in optimizer._weights.values()]
        assert_same(found, kept)
        model.load_state_dict({key: 2 * x for key, x in model.state_dict().items()})
        kept = [p.detach().float() for p in model.parameters()]


def halve_vector(model: nn.Module) -> None:
    x = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.5 * x, model.parameters())


def prune_half(model: nn.Module) -> None:
    for p in model.parameters():
        p.data[p.data.abs() < p.data.abs().median()] = 0


HOST_EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(model_of(torch.float32).state_dict()),
    "vector_to_parameters": halve_vector,
    ".data": prune_half,
}


@over_modes
@over_transfers
@pytest.mark.parametrize("edit", HOST_EDITS)
@pytest.mark.parametrize("case", ["fp32 weights", "bf16+8", "torch's, fp32", "torch's, bf16"])
def test_a_step_goes_on_from_edited_weights(mode: str, transfers: Any, edit: str, case: str) -> None:
    """As it does in memory: never back to weights of before."""
    dtype = torch.float32 if case == "torch's, fp32" else torch.bfloat16
    build = torch.optim.AdamW if "torch" in case else functools.partial(optim.AdamW8bit, min_8bit_size=0)
    here = {"fp32 weights": {"master_weights": "fp32"}, "bf16+8": {"master_weights": "bf16+8"}}.get(case, {})
    offloaded = functools.partial(HostOffload, transfers=transfers, **MODES[mode])
    there = here if case == "bf16+8" else {}
    models = [model_of(dtype) for _ in range(2)]
    optimizers = [
        build(models[0].parameters(), lr=1e-2, **here),
        offloaded(build.func if isinstance(build, functools.partial) else build, models[1].parameters(), lr=1e-2,
                  **(build.keywords if isinstance(build, functools.partial) else {}), **there),
    ]  # fmt: skip
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            losses(model, 1)[0].backward()
            if step == 1 and mode != "step_in_backward":
                HOST_EDITS[edit](model)  # between the backward pass and the step, too
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                HOST_EDITS[edit](model)
    if case == "torch's, bf16":  # which has no fp32 weights in memory
        before = [p.detach().clone() for p in models[1].parameters()]
        HOST_EDITS[edit](models[1])
        edited = [p.detach().clone() for p in models[1].parameters()]
        losses(models[1], 1)[0].backward()
        optimizers[1].step()
        for p, x, y in zip(models[1].parameters(), edited, before, strict=True):
            assert ((p - x).abs() <= 0.011 + x.abs() / 128).all()
            assert not torch.equal(p, y)
    else:
        assert_same(
            [p.detach() for p in models[1].parameters()], [p.detach() for p in models[0].parameters()]
        )


def test_a_model_that_changes_its_memory_format() -> None:
    conv = nn.Conv2d(4, 8, 3)
    optimizer = HostOffload(optim.AdamW8bit, conv.parameters(), min_8bit_size=0)
    plain = copy.deepcopy(conv)
    expected = optim.AdamW8bit(plain.parameters(), min_8bit_size=0)
    for step in range(3):
        x = torch.randn(2, 4, 5, 5)
        for m, o in ((conv, optimizer), (plain, expected)):
            if step == 1:
                m.to(memory_format=torch.channels_last)
            m(x).sum().backward()
            o.step()
            o.zero_grad()
    assert_same(snapshot(optimizer), snapshot(expected))


# ---- it is an optimizer


@over_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_a_run_goes_on_from_its_state_dict(mode: str, dtype: torch.dtype) -> None:
    make = lambda params: HostOffload(optim.AdamW8bit, params, min_8bit_size=0, **MODES[mode])  # noqa: E731
    _, optimizer, model = run(make, dtype=dtype)
    state = saved(optimizer.state_dict())
    assert ("host_weights" in state) == (dtype == torch.float16)
    assert ("master_weight" in state["state"][0]) == (dtype == torch.bfloat16)
    again = copy.deepcopy(model)
    other = make(again.parameters())
    other.load_state_dict(state)
    for m, o in ((model, optimizer), (again, other)):
        for loss in losses(m, 1):
            loss.backward()
        o.step()
        o.zero_grad()
    assert_same(snapshot(other), snapshot(optimizer))
    assert_same(saved(other.state_dict()), saved(optimizer.state_dict()))


def test_state_dicts_of_the_optimizer_in_memory() -> None:
    _, plain, model = run(lambda params: optim.AdamW8bit(params, min_8bit_size=0))
    _, optimizer, _ = run(lambda params: HostOffload(optim.AdamW8bit, params, min_8bit_size=0))
    assert_same(optimizer.state_dict(), plain.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    half = HostOffload(optim.AdamW8bit, model.to(torch.float16).parameters(), min_8bit_size=0)
    half.load_state_dict(plain.state_dict())
    for w in half._weights.values():
        assert torch.equal(w.host_param, w.p.float())


def test_a_state_dict_that_does_not_fit() -> None:
    _, optimizer, _ = run(lambda params: HostOffload(optim.AdamW, params), dtype=torch.float16)
    before = snapshot(optimizer)
    state = optimizer.state_dict()
    wrong = {**state, "host_weights": {0: torch.zeros(3)}}
    with pytest.raises(
        ValueError, match=r"host_weights .* do not fit: 0 of shape \(3,\), expected \(16, 16\)"
    ):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match="not one of memkern's AdamW"):
        optimizer.load_state_dict({**state, "param_groups": [{"params": state["param_groups"][0]["params"]}]})
    assert_same(snapshot(optimizer), before)


@over_modes
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies(mode: str, way: Callable[[Any], Any]) -> None:
    make = lambda params: HostOffload(optim.AdamW, params, **MODES[mode])  # noqa: E731
    _, optimizer, model = run(make, dtype=torch.bfloat16)
    again, other = way((model, optimizer))
    for m, o in ((model, optimizer), (again, other)):
        for loss in losses(m, 1):
            loss.backward()
        o.step()
        o.zero_grad()
    assert_same(snapshot(other), snapshot(optimizer))
    assert other._weights.keys() == {*again.parameters()}


def test_groups_named_parameters_and_one_that_comes_later() -> None:
    results = []
    for offload in (False, True):
        model = model_of()
        named = [*model.named_parameters()]
        groups = [{"params": named[:2], "lr": 0.1}, {"params": named[2:4], "weight_decay": 0.0}]
        optimizer = HostOffload(optim.AdamW, groups) if offload else optim.AdamW(groups)
        optimizer.add_param_group({"params": named[4:], "betas": (0.5, 0.9)})
        assert optimizer.param_groups[2]["param_names"] == [name for name, _ in named[4:]]
        for loss in losses(model, 1):
            loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[1]["state_bits"] = 32
        optimizer.step()
        results.append((snapshot(optimizer), optimizer.state_dict()))
    assert_same(results[1], results[0])


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = HostOffload(optim.AdamW, [nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="weight_decay must be 0 or more and finite, got -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "weight_decay": -1})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == len(optimizer._weights) == 1


def test_hooks_of_the_step_run_once() -> None:
    seen: list[str] = []
    _, optimizer, _ = run(lambda params: HostOffload(optim.AdamW, params), steps=1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


# ---- what cannot work


def test_bad_options() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for options, error, message in (
        (
            {"host_dtype": torch.bfloat16},
            ValueError,
            "host_dtype must be None, torch.float32 or torch.float64, got",
        ),
        (
            {"device_state_bytes": -1},
            ValueError,
            "device_state_bytes must be None or a number of bytes.* got -1",
        ),
        ({"device_state_bytes": "1GiB"}, ValueError, "device_state_bytes must be None or .* got '1GiB'"),
        ({"step_in_backward": True, "max_grad_norm": 1.0}, ValueError, "max_grad_norm must be None, got 1.0"),
        ({"lr": -1.0}, ValueError, "lr must be 0 or more"),
    ):
        with pytest.raises(error, match=message):
            HostOffload(optim.AdamW, params, **options)
    for given in (torch.optim.LBFGS, HostOffload, "AdamW"):
        with pytest.raises(TypeError, match="optimizer_class must be"):
            HostOffload(given, params)


def test_step_in_backward_takes_one_gradient_a_step() -> None:
    p = nn.Parameter(torch.ones(400))
    optimizer = HostOffload(optim.AdamW, [p], step_in_backward=True)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"a second gradient of a parameter of shape \(400,\) before step\(\)"
    ):
        p.sum().backward()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize("mode", ["offload_gradients", "step_in_backward"])
def test_a_scaler_needs_gradients_on_the_device(mode: str) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer, scaler = HostOffload(optim.AdamW, [p], **MODES[mode]), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(
        RuntimeError, match=r"a GradScaler cannot be used with this HostOffload.*offload_gradients"
    ):
        scaler.step(optimizer)


def test_a_bad_gradient_is_refused_before_anything_is_changed() -> None:
    a, b = nn.Parameter(torch.ones(400)), nn.Parameter(torch.ones(400, 2))
    optimizer = HostOffload(optim.AdamW, [a, b], transfers=LateTransfers)
    a.grad = torch.ones(400)
    b.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (400, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"dense gradients, got torch\.sparse_coo"):
        optimizer.step()
    assert torch.equal(a, torch.ones(400))


def test_an_error_in_the_worker_reaches_step() -> None:
    class Broken(optim.AdamW):
        def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
            raise RuntimeError("no state today")

    p = nn.Parameter(torch.ones(400))
    optimizer = HostOffload(Broken, [p], step_in_backward=True)
    p.sum().backward()
    with pytest.raises(RuntimeError, match="no state today"):
        optimizer.step()
    assert not optimizer._stepped


def test_transfers_of_the_cpu_are_plain_copies() -> None:
    made = transfers_of(torch.device("cpu"))
    assert type(made) is Transfers
    assert made.shares_memory


def test_fp32_weights_of_a_model_whose_optimizer_is_on_the_host() -> None:
    for dtype, new in (
        (torch.bfloat16, optim.AdamW8bit),
        (torch.bfloat16, torch.optim.AdamW),
        (torch.float16, optim.AdamW),
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 128).to(dtype)
        expected = torch.nn.Linear(64, 128)
        expected.load_state_dict(model.state_dict())
        host, plain = optim.HostOffload(new, model.parameters(), lr=1e-4), new(expected.parameters(), lr=1e-4)
        for _ in range(5):
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                p.grad = torch.randn(p.shape).to(dtype)
                q.grad = p.grad.float()
            host.step()
            plain.step()
        found = optim.to_fp32_state_dict(model, host)
        for name, x in expected.state_dict().items():
            torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-7)
        if new is optim.AdamW8bit:
            with pytest.raises(
                ValueError, match="is model a copy, or optimizer the inner one of a HostOffload"
            ):
                optim.to_fp32_state_dict(copy.deepcopy(model), host)
            with pytest.raises(TypeError, match="HostOffload"):
                optim.load_fp32_state_dict(model, host, found)
