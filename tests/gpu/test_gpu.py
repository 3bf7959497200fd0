"""On a real GPU optimizers and codes work with graphs, streams, scalers, large tensors, by few launches (`make gpu`).

That the kernels give the reference's bits is tested with the CPU's, over the same parameters (tests/kernels,
tests/optim).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

import memkern
from memkern import optim
from memkern.quant.layout import layout_of
from tests.support.helpers import assert_same, hard, like, name_of, on, over_gpu, snapshot

SHAPES = [(64, 128), (37, 53), (300,), (40, 1000)]
STEPS = 6
LARGE = 2_200_000_011  # more than 2**31 elements, and a short last block
over_builds = pytest.mark.parametrize(
    "build", [optim.AdamW8bit, optim.Lion8bit, optim.AdamW, optim.LAMB8bit, optim.LARS8bit], ids=name_of
)


def make_optimizer(build: type, device: str, seed: int = 0, **options: Any) -> tuple[list[Any], torch.optim.Optimizer]:
    params = [torch.nn.Parameter(hard(shape, seed + i, scale=0.1).to(device)) for i, shape in enumerate(SHAPES)]
    return params, build(params, min_8bit_size=0, weight_decay=0.1, **options)


def set_gradients(params: list[Any], step: int) -> None:
    """New gradients, in place where there are some: a graph reads the same memory at every replay."""
    for i, p in enumerate(params):
        g = like(p.cpu(), 100 * step + i).to(p.device)
        if p.grad is None:
            p.grad = g
        else:
            p.grad.copy_(g)


def rate(step: int) -> float:
    return 1e-2 * 0.8**step


def reference_snapshot(build: type, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Parameters and states after steps of the reference, on the CPU, while a scheduler changes lr."""
    params, optimizer = make_optimizer(build, "cpu", lr=torch.tensor(rate(0), dtype=torch.float64), **options)
    with on("reference"):
        for step in range(steps):
            optimizer.param_groups[0]["lr"].fill_(rate(step))
            set_gradients(params, step)
            optimizer.step()
    return snapshot(optimizer)


def skip_layerwise_bits(build: type) -> None:
    if build in (optim.LAMB8bit, optim.LARS8bit):
        pytest.skip("norms are summed in another order than the reference's")


# ---- graphs and streams


@over_gpu
@over_builds
def test_a_graph_replays_while_a_scheduler_changes_lr(backend: str, build: type) -> None:
    params, optimizer = make_optimizer(build, "cuda", lr=rate(0), capturable=True)
    other_params, other = make_optimizer(build, "cuda", seed=50)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    side = torch.cuda.Stream()
    with on(backend):
        set_gradients(params, 0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for step in range(1, STEPS):
            scheduler.step()
            set_gradients(params, step)
            graph.replay()
            set_gradients(other_params, step)  # an eager step in between leaves the graph alone
            other.step()
    actual = snapshot(optimizer)
    params, eager = make_optimizer(build, "cuda", lr=torch.tensor(rate(0), dtype=torch.float64, device="cuda"))
    with on(backend):
        for step in range(STEPS):
            eager.param_groups[0]["lr"].copy_(optimizer.param_groups[0]["initial_lr"] * 0.8**step)
            set_gradients(params, step)
            eager.step()
    assert_same(actual, snapshot(eager))


@over_gpu
@over_builds
def test_streams_do_not_disturb_each_other(backend: str, build: type) -> None:
    runs = [make_optimizer(build, "cuda", lr=torch.tensor(rate(0), dtype=torch.float64)) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    with on(backend):
        for step in range(STEPS):
            for (params, optimizer), stream in zip(runs, streams, strict=True):
                with torch.cuda.stream(stream):
                    optimizer.param_groups[0]["lr"].fill_(rate(step))
                    set_gradients(params, step)
                    optimizer.step()
    torch.cuda.synchronize()
    for _, optimizer in runs[1:]:
        assert_same(snapshot(optimizer), snapshot(runs[0][1]))
    skip_layerwise_bits(build)
    assert_same(snapshot(runs[0][1]), reference_snapshot(build))


@over_gpu
@pytest.mark.parametrize("stray", ["exp_avg", "exp_avg_scale", "step"])
def test_a_state_left_on_the_cpu_is_refused(backend: str, stray: str) -> None:
    params, optimizer = make_optimizer(optim.AdamW8bit, "cuda")
    with on(backend):
        set_gradients(params, 0)
        optimizer.step()
        before = [p.clone() for p in params]
        state = optimizer.state[params[1]]
        state[stray] = state[stray].cpu()
        with pytest.raises((RuntimeError, ValueError), match=r"must be .*on"):
            optimizer.step()
    assert_same(params, before)


# ---- scalers


@over_gpu
@over_builds
def test_a_scaler_skips_what_is_not_finite_and_never_waits(backend: str, build: type) -> None:
    skip_layerwise_bits(build)
    runs = []
    for device, op_backend in (("cuda", backend), ("cpu", "reference")):
        params, optimizer = make_optimizer(build, device, lr=1e-2)
        scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)
        with on(op_backend):
            for step in range(STEPS):
                optimizer.zero_grad()
                for i, p in enumerate(params):
                    g = like(p.cpu(), 100 * step + i).to(device)
                    if step == 3:
                        g.view(-1)[7] = torch.inf
                    scaler.scale((p * g).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        runs.append(snapshot(optimizer))
    assert_same(*runs)


# ---- waiting, memory, launches


@over_gpu
@over_builds
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_does_not_wait_and_allocates_nothing(backend: str, build: type, max_grad_norm: float | None) -> None:
    params, optimizer = make_optimizer(build, "cuda", lr=1e-2, max_grad_norm=max_grad_norm)
    for i in range(3):
        set_gradients(params, i)
        with on(backend):
            optimizer.step()
    set_gradients(params, 9)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with on(backend):
            for _ in range(3):
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@over_gpu
@over_builds
@pytest.mark.parametrize("tensors", [1, 148, 1000])
def test_launches_are_few_whatever_the_number_of_tensors(backend: str, build: type, tensors: int) -> None:
    params = [torch.nn.Parameter(torch.ones(40, device="cuda")) for _ in range(tensors)]
    optimizer = build(params, lr=1e-2)
    with on(backend):
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        for p in params:
            p.grad = torch.ones_like(p)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            optimizer.step()
            torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # Neither copies and fills, nor the step's own range, which torch 2.11 lists among the device's events too.
    kernels = [name for name in on_device if not name.startswith(("Mem", "Optimizer.step"))]
    # The table where gradients are new ones, a prologue, the update; layer by layer the norms and the ratios as well.
    max_launches = 5 if build in (optim.LAMB8bit, optim.LARS8bit) else 4
    assert 1 <= len(kernels) <= max_launches, kernels


# ---- large tensors


large = pytest.mark.xdist_group("large")


def windows(block: int) -> dict[str, slice]:
    """The first blocks, those on both sides of 2**31 elements, and the last with its short end."""
    middle = 2**31 // block * block
    return {
        "first": slice(0, 64 * block),
        "beyond 2**31": slice(middle - 32 * block, middle + 32 * block),
        "last": slice(LARGE // block * block - 64 * block, LARGE),
    }


def skip_below(gigabytes: float) -> None:
    """Skips a test where less GPU memory is free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"{gigabytes:.0f} GB of GPU memory are needed, {free:.0f} are free")


@large
@over_gpu
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.Lion8bit], ids=name_of)
def test_more_elements_than_32_bits_count(backend: str, build: type) -> None:
    skip_below(gigabytes=20)
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.empty(LARGE, dtype=torch.bfloat16, device="cuda").normal_(0, 0.1))
    optimizer = build([p], lr=1e-2, weight_decay=0.1)
    places = windows(128)
    parts = {name: torch.nn.Parameter(p.detach()[place].cpu(), requires_grad=True) for name, place in places.items()}
    small = build([*parts.values()], lr=1e-2, weight_decay=0.1, min_8bit_size=0)
    for _ in range(2):
        p.grad = torch.empty_like(p).normal_(0, 1e-3)
        for name, place in places.items():
            parts[name].grad = p.grad[place].cpu()
        with on(backend):
            optimizer.step()
        with on("reference"):
            small.step()
    for name, place in places.items():
        blocks = slice(place.start // 128, -(-place.stop // 128))
        state = {
            key: value if not value.dim() else value[blocks if key.endswith("_scale") else place]
            for key, value in optimizer.state[p].items()
        }
        assert_same(p[place], parts[name], f"parameter, {name}")
        assert_same(state, small.state[parts[name]], f"state, {name}")


@large
@over_gpu
def test_codes_of_more_elements_than_32_bits_count(backend: str) -> None:
    skip_below(gigabytes=16)
    x = torch.empty(LARGE, dtype=torch.bfloat16, device="cuda").normal_()
    with on(backend):
        codes, scale = memkern.quantize_blockwise(x, block_size=128)
        back = memkern.dequantize_blockwise(codes, scale, block_size=128, dtype=torch.bfloat16)
    for name, place in windows(128).items():
        part: Tensor = x[place].cpu()
        with on("reference"):
            expected_codes, expected_scale = memkern.quantize_blockwise(part, block_size=128)
            expected_back = memkern.dequantize_blockwise(
                expected_codes, expected_scale, block_size=128, dtype=torch.bfloat16
            )
        first = place.start // 128
        assert layout_of(part, 128).blocks == expected_scale.numel()
        assert_same(codes[place], expected_codes, f"codes, {name}")
        assert_same(scale[first : first + expected_scale.numel()], expected_scale, f"scale, {name}")
        assert_same(back[place], expected_back, f"values, {name}")
