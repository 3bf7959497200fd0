"""HostOffload(step_on="device"): bits of the step without it, order of copies, bytes of the device."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import memory, optim
from memkern.optim import HostOffload
from memkern.optim.offload import device
from memkern.optim.offload import pinned as pinned_memory
from memkern.optim.offload.transfers import StreamTransfers, Transfers
from memkern.planner import fake_cuda
from tests.optim.offload import on_cuda
from tests.support.helpers import assert_same, needs_fake_cuda, over_kinds, snapshot
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import ON_DEVICE, events_of_a_step, losses, model_of, options_of, run

over_modes = pytest.mark.parametrize("mode", ON_DEVICE)


def on_device(build: Any, mode: str = "device", wrapper: Any = LateHostOffload, **options: Any) -> Callable[[Any], Any]:
    return lambda params: wrapper(build, params, **ON_DEVICE[mode], **options)


def regions_of(optimizer: Any) -> list[Any]:
    """The states' regions (of the host's memory), in the order of the parameters."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [*dict.fromkeys(state.region for state in states)]


# ---- the same result (of whole parameters: test_host.py)


@over_modes
@over_kinds
def test_is_the_optimizer_in_memory_with_states_elsewhere(build: type, mode: str) -> None:
    options = options_of(build)
    _, plain, _ = run(lambda params: build(params, **options))
    _, optimizer, _ = run(on_device(build, mode, **options))
    assert isinstance(optimizer, build)
    assert type(optimizer).__name__.endswith(f"HostOffload({build.__name__})" + ")" * ("backward" in mode))
    states = optimizer.state_dict()["state"]  # a step in backward makes them in another order
    assert_same(dict(sorted(states.items())), plain.state_dict()["state"])
    assert len({*regions_of(optimizer)}) > 1


@pytest.mark.pairwise
@over_modes
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "SGD8bit", "Adam", "Muon8bit"])
@pytest.mark.parametrize("shape", [(40, 300), (50, 24), (3, 17, 100), (4000,), (1, 700)], ids=str)
def test_parameters_that_come_some_rows_at_a_time_have_the_bits_of_the_step_in_memory(
    name: str, shape: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows longer than a block, several rows to a block, one row alone; all with rounding errors of bf16 weights."""
    monkeypatch.setattr(device, "BUCKET_BYTES", 2500)
    adamw = {"algorithm": "adamw", "lr": 1e-3} if name == "Muon8bit" else {}
    options = {"amsgrad": True} if name == "Adam" else {"min_8bit_size": 0, "block_size": 64}
    options |= {"master_weights": "bf16+8"}

    def train(make: Callable[[Any], Any]) -> Any:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in (shape, (9,), shape)]
        optimizer = make([{"params": params, **adamw}])
        for step in range(5):
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                params[0].data = params[0].data.clone()
            sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(optimizer), optimizer

    build = getattr(optim, name)
    expected, _ = train(lambda params: build(params, **options))
    result, optimizer = train(on_device(build, mode, **options))
    assert_same(result, expected)
    (stage,) = optimizer._stages.values()
    region = regions_of(optimizer)[0]
    assert len(region.buckets) > 1 or shape[0] == 1
    max_bytes = max(2500 + 5 * 128, 1.2 * region.size / shape[0])  # a bucket and its entries' alignment, or one row
    assert all(slot.memory.nbytes <= max_bytes for slot in stage.slots)
    # Copies are of the memory as it was allocated: only its storage has torch wait for them before it is used again.
    copied = {host.untyped_storage().data_ptr() for bucket in region.buckets for host, _ in bucket.copies}
    assert copied == {region.host.untyped_storage().data_ptr()}


def test_matrices_that_muon_orthogonalizes_together_are_in_one_region() -> None:
    shapes = [(64, 64)] * 4 + [(64,)]

    def train(make: Callable[[Any], Any]) -> Any:
        params = [nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(1))) for s in shapes]
        optimizer = make([{"params": params[:4]}, {"params": params[4:], "algorithm": "adamw", "lr": 1e-3}])
        for step in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return optimizer, snapshot(optimizer)

    optimizer, result = train(on_device(optim.Muon8bit))
    assert_same(result, train(optim.Muon8bit)[1])
    assert [len(region.places) for region in regions_of(optimizer)] == [4, 1]


# ---- the order of copies


@over_modes
def test_the_next_states_come_while_one_bucket_is_stepped(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits for each bucket's states; the host waits for nothing. Events: (kind,) direction, number."""
    monkeypatch.setattr(device, "BUCKET_BYTES", 3500)  # the moments of a matrix
    assert [e for e in events_of_a_step(ON_DEVICE[mode], []) if not isinstance(e, str)] == [
        *(("up", 0), ("device waits", "up", 0), ("down", 0)),
        *(("up", 1), ("device waits", "up", 1), ("down", 1)),
        *(("up", 2), ("device waits", "up", 2), ("down", 2)),
    ]


def test_the_host_spends_less_than_60_us_on_a_bucket() -> None:
    """The time has neither the op nor the copies. It is 15 us on a core of an EPYC; 60 us allow for a slower core."""
    optimizer = on_device(optim.AdamW8bit, min_8bit_size=0)([nn.Parameter(torch.randn(8, 8)) for _ in range(40)])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()

    class NoTransfers(Transfers):
        shares_memory = False

        def to_host(self, host: Tensor, x: Tensor) -> Any:
            return 1

        def to_device(self, x: Tensor, host: Tensor, *after: Any) -> Any:
            return 1

    (region, *_) = regions_of(optimizer)
    (bucket,) = region.buckets
    region.stage.transfers = NoTransfers()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        region.stage.begin()
        with bucket.on_device():
            pass
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 60e-6


# ---- between the steps (edits of groups and states: test_host_groups.py)


def test_moments_that_are_edited_in_place_are_brought_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step a moment is halved; in the third step two of three gradients are missing."""
    monkeypatch.setattr(device, "BUCKET_BYTES", 4000)  # whole parameters

    def train(make: Callable[[Any], Any]) -> Any:
        params = [nn.Parameter(torch.ones(20, 20)) for _ in range(3)]
        optimizer = make(params)
        for step in range(4):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + i + step) if step != 2 or i == 0 else None
            optimizer.step()
            optimizer.state[params[1]]["exp_avg"].mul_(0.5)
        return snapshot(optimizer)

    assert_same(train(on_device(optim.AdamW)), train(optim.AdamW))


def test_a_compiled_step_has_the_bits_of_the_step_in_memory() -> None:
    results = []
    for make in (optim.AdamW8bit, on_device(optim.AdamW8bit)):
        model = model_of()
        optimizer: Any = make(model.parameters())
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            losses(model, 1)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(optimizer))
    assert_same(*results)


def test_memory_of_former_states_is_freed() -> None:
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    optimizer = on_device(optim.AdamW, "device")(params)
    held_bytes = []
    for bits in (32, 8, 32, 8):
        optimizer.param_groups[0].update(state_bits=bits, min_8bit_size=0)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        (stage,) = optimizer._stages.values()
        held_bytes.append(sum(x.nbytes for x in stage.slabs._allocated.values()))
    assert held_bytes[2:] == held_bytes[:2]


def test_states_of_parameters_with_a_gradient_now_and_then_stay_in_place() -> None:
    """Parameters of experts have no gradient in some steps. Their states keep their addresses in the host's memory."""

    def train(make: Callable[[Any], Any]) -> Any:
        params = [nn.Parameter(torch.full((20, 20), 1.0 + i)) for i in range(6)]
        optimizer, places = make(params), set()
        for step in range(12):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + step) if (step >> i % 3) & 1 else None
            optimizer.step()
            places |= {x.data_ptr() for s in optimizer.state.values() for x in s.values()}
        return snapshot(optimizer), len(places)

    expected, _ = train(optim.AdamW)
    result, places = train(on_device(optim.AdamW))
    assert_same(result, expected)
    assert places == 6 * 3  # exp_avg, exp_avg_sq and step of each parameter


def test_a_run_resumes_with_another_place_to_step(tmp_path: Any) -> None:
    """Runs without HostOffload, with steps on the device, in the backward pass, on the CPU, and without it again."""
    options = {"lr": 1e-2, "min_8bit_size": 0, "master_weights": "bf16+16"}
    builders = [
        lambda p: optim.AdamW8bit(p, **options),
        on_device(optim.AdamW8bit, "device", **options),
        on_device(optim.AdamW8bit, "device, in backward", **options),
        lambda p: LateHostOffload(optim.AdamW8bit, p, **options),
        lambda p: optim.AdamW8bit(p, **options),
    ]
    results = []
    for makers in (builders, builders[:1] * len(builders)):
        model, state = model_of(torch.bfloat16), None
        for seed, make in enumerate(makers):
            optimizer = make(model.parameters())
            if state is not None:
                optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            for _ in range(2):
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(8, 16, generator=generator).bfloat16()
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.state_dict()
            torch.save(state, tmp_path / "state.pt")
        results.append(({i: dict(x) for i, x in sorted(state["state"].items())}, [*model.parameters()]))
    assert_same(results[0], results[1])


def test_states_of_parameters_without_elements_are_saved(tmp_path: Any) -> None:
    """As on a rank without rows. torch.save must not write a region's whole storage for a state without elements."""
    params = [nn.Parameter(torch.ones(size, 64, dtype=torch.bfloat16)) for size in (64, 0)]
    options, sizes = {"min_8bit_size": 0, "master_weights": "bf16+16"}, []
    for optimizer in (optim.AdamW8bit(params, **options), on_device(optim.AdamW8bit, **options)(params)):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        sizes.append((tmp_path / "state.pt").stat().st_size)
    assert sizes[1] < sizes[0] + 1024


def test_exported_and_imported_fp32_weights_are_those_of_the_step_in_memory() -> None:
    results = []
    for make in (optim.AdamW8bit, lambda p, **o: LateHostOffload(optim.AdamW8bit, p, step_on="device", **o)):
        model = model_of(torch.bfloat16)
        optimizer = make(model.parameters(), master_weights="bf16+16", min_8bit_size=0)
        losses(model, 1)[0].backward()
        optimizer.step()
        weights = optim.to_fp32_state_dict(model, optimizer)
        optim.load_fp32_state_dict(model, optimizer, {name: 1.01 * x for name, x in weights.items()})
        torch_state = optim.to_torch_state_dict(optimizer)
        optimizer.load_state_dict(optim.from_torch_state_dict(optimizer, torch_state))
        optimizer.step()
        results.append((weights, torch_state["state"], snapshot(optimizer)))
    assert_same(*results)


# ---- memory


@pytest.mark.full
@needs_fake_cuda
def test_the_device_holds_two_buckets_beside_weights_and_gradients() -> None:
    """The peak is gradients and products p * p, beside two buckets; no operator takes tensors of two devices."""
    for (name, _, in_backward), report in fake_cuda.call(on_cuda.all_steps).items():
        gradient = report["weights"] // on_cuda.COUNT
        assert report["states"] == {"cpu"}
        # Two buckets. LAMB's are whole tensors, whose states take up to 4.2 bytes an element, a bf16 gradient 2.
        assert report["buffers"] <= 2 * (2**22 if name != "LAMB8bit" else max(2**22, 2.1 * gradient))
        assert report["peak"] <= (3 if in_backward else on_cuda.COUNT + 2) * gradient + 2**12


@pytest.mark.full
@needs_fake_cuda
def test_a_state_on_the_host_loads_into_an_optimizer_on_the_device() -> None:
    assert fake_cuda.call(on_cuda.devices_of_states_loaded_from_the_host) == {"cuda"}


def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(pinned_memory, "_pinned", refuse)
    warned = pytest.warns(UserWarning, match=r"4096 bytes .* cannot be pinned \(CUDA error: out of memory\).*ulimit -l")
    with warned, torch.device("meta"):  # whatever torch's default device
        memory_block = StreamTransfers.host_memory(object.__new__(StreamTransfers), 4096)
        assert Transfers().host_memory(8).is_cpu
    assert memory_block.is_cpu
    assert memory_block.nbytes == 4096
    assert not memory_block.is_pinned()


@over_modes
def test_on_the_cpu_no_state_is_copied(mode: str) -> None:
    model = model_of()
    optimizer = on_device(optim.AdamW8bit, mode, HostOffload)(model.parameters())
    losses(model, 1)[0].backward()
    optimizer.step()
    assert all(state.region is None for state in optimizer.state.values())
    assert memory.optimizer_bytes(optimizer) == sum(x.nbytes for s in optimizer.state.values() for x in s.values())
