"""memkern.plan with weights_on_host predicts bytes of the device and of the host, and the time of a step."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.planner import fake_cuda
from memkern.planner.choice import Chooser
from memkern.planner.fake_step import StaticBytes
from memkern.planner.hardware import DEFAULTS, seconds
from memkern.planner.prediction import Predictor
from memkern.planner.shards import WeightsOnHost
from memkern.planner.trace import Trace
from memkern.techniques.options import Techniques
from tests.support.helpers import first_full, needs_fake_cuda
from tests.support.planned_models import predictor_of

WIDTH, DEPTH = 64, 4
GIB = 2**30
BLOCK = 4 * (WIDTH * WIDTH + WIDTH)
FRUGAL: dict[str, Any] = {
    "precision": "bf16", "master_weights": "bf16+8", "state_bits": 8, "weights_on_host": "layers",
}  # fmt: skip
LONG = FRUGAL | {"checkpointing": "blocks", "loss_chunk": 4096, "step_in_backward": True}


class Stack(nn.Module):
    """Blocks, an output layer and a buffer; returns a loss."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def predictor(model: nn.Module | None = None, device: str = "cuda") -> Predictor:
    return predictor_of(model or Stack(), torch.zeros(2, WIDTH), device)


# ---- the device


def test_what_is_brought_in_each_part_of_a_step() -> None:
    operators: list[Any] = [("op",)] * 14
    # Forward: embedding, two blocks of two operators, output layer. Backward: output layer, two blocks, embedding.
    trace = Trace([], {}, operators, 7, block_clocks=((1, 12), (3, 10)), output_begin=7)
    groups = WeightsOnHost(embedding=1000, block=10, output_layer=100, root=1, block_tensor=2)
    forward = [2001, 1013, 23, 21, 211, 111, 101, 101]
    backward = [221, 221, 221, 41, 41, 1011, 1011]
    assert groups.extra_bytes(trace) == forward + backward
    assert set(groups.extra_bytes(Trace([], {}, operators, 7))) == {5001}


def test_tied_weights_are_the_roots_and_the_last_block_stays() -> None:
    trace = Trace([], {}, [("op",)] * 8, 4, block_clocks=((0, 8), (2, 6)))
    groups = WeightsOnHost(block=10, root=100, block_tensor=2)
    assert groups.extra_bytes(trace) == [100, 122, 120, 110, 110, 120, 140, 140, 140]


def test_the_device_has_no_weights_states_or_errors_and_the_host_has_all() -> None:
    streamed = predictor().predict(Techniques(**FRUGAL))
    on_device = predictor().predict(Techniques(**FRUGAL | {"weights_on_host": None}))
    assert streamed.categories["parameters"] == 2 * WIDTH  # the buffer
    assert not any(streamed.categories[name] for name in ("errors", "optimizer"))
    assert streamed.peak < on_device.peak
    held = sum(on_device.categories[name] for name in ("parameters", "errors", "optimizer"))
    weights = held - on_device.categories["errors"] - on_device.categories["optimizer"] - 2 * WIDTH
    # weights in slabs, and all gradients, each rounded up to a power of two
    assert held - 2 * WIDTH + 2.03 * weights <= streamed.host + weights <= held + 3.03 * weights
    assert streamed.brought == weights


def test_gradients_on_the_host_are_those_of_three_groups_or_of_all() -> None:
    model, techniques = Stack(12), Techniques(weights_on_host="layers")
    plain, stepped, accumulated = (
        predictor(model).held_on_host(techniques.replace(**changes))
        for changes in ({}, {"step_in_backward": True}, {"accumulation": 2})
    )
    static_bytes = predictor(model).static_bytes(techniques)
    rounded = static_bytes.pinned / static_bytes.parameters
    assert plain - stepped == pytest.approx((static_bytes.gradients - 3 * BLOCK) * rounded, abs=2)
    assert accumulated - plain == pytest.approx(3 * BLOCK * rounded, abs=2)


def test_on_the_cpu_weights_are_counted_where_they_are() -> None:
    streamed, plain = (
        predictor(device="cpu").predict(Techniques(weights_on_host=place, step_in_backward=True))
        for place in ("layers", None)
    )
    assert streamed.categories["parameters"] == plain.categories["parameters"]
    assert streamed.peak > plain.peak
    assert (streamed.host, streamed.brought) == (0, 0)


# ---- time

SPEEDS = dataclasses.replace(DEFAULTS["cuda"], half_flops=1e12, link=1e9, bandwidth=1e12, host_bandwidth=1e10)
SIZES = StaticBytes(
    count=10**6, head=0, parameters=2 * 10**6, errors=10**6, gradients=2 * 10**6, optimizer=2 * 10**6,
    step_temporaries=0, largest_gradient=0,
)  # fmt: skip
STEP = 12 * 10**6  # bytes that an optimizer's step moves: gradients once; weights, errors and states twice


def time_of(techniques: Techniques, tokens: int, brought: int = 0) -> float:
    """The seconds of a step that brings so many bytes to the device in each pass."""
    return seconds(SPEEDS, techniques, SIZES, tokens=tokens, attention=0.0, compiled=1.0, brought=brought)


def test_a_pass_takes_at_least_the_time_of_its_transfers() -> None:
    techniques = Techniques(**FRUGAL)  # 2e6 bytes take 2 ms, as 1000 tokens of 2e6 operations do
    assert time_of(techniques, 1001, 2 * 10**6) == time_of(techniques, 1001)
    assert time_of(techniques, 900, 2 * 10**6) > time_of(techniques, 900)


def test_the_hosts_step_is_hidden_by_the_backward_pass_and_never_faster_than_the_devices() -> None:
    after, inside, on_device = (
        Techniques(**FRUGAL | {"weights_on_host": place, "step_in_backward": steps})
        for place, steps in (("layers", False), ("layers", True), (None, True))
    )
    # the step takes 1.2 ms on the host, as long as the backward pass with 300 tokens
    assert time_of(after, 301) - time_of(inside, 301) == pytest.approx(
        STEP / SPEEDS.host_bandwidth - STEP / SPEEDS.bandwidth
    )
    assert time_of(inside, 301) == time_of(on_device, 301)
    assert time_of(inside, 150) > time_of(on_device, 150)


# ---- plans


@pytest.mark.full
def test_an_8b_model_fits_a_card_of_12_gb_if_the_host_has_the_memory() -> None:
    """As ``plan --model llama-3.1-8b --memory 12GiB --host-memory 64GiB``, with some techniques given."""
    fixed = LONG | {"activation_bits": None, "compile": False}
    del fixed["weights_on_host"]
    plan = memkern.plan("llama-3.1-8b", memory="12GiB", host_memory="64GiB", techniques=fixed)
    best = plan.recommended
    assert best is not None
    assert best.techniques.weights_on_host == "layers"
    assert best.peak * (1 + plan.band[0]) <= 12 * GIB
    assert 5.06 * plan.parameters <= best.host <= 64 * GIB  # bytes: a weight 2, its error 1, moments 2, scales 0.06
    assert "weights_on_host='layers'" in plan.code()
    text = str(plan)
    assert "weights and optimizer on the host" in text
    assert f"On the host: {best.host / GIB:.2f} GiB." in text
    assert "Weights: 14.96 GiB to the device in each pass, and gradients back: 0.64 s at 25 GB/s." in text


def test_memory_on_the_host_is_a_limit() -> None:
    predictions = predictor(Stack(12))
    fixed = FRUGAL | {"step_in_backward": True}
    streamed = predictions.predict(Techniques(**fixed))
    del fixed["weights_on_host"]
    memory = streamed.peak + 8 * BLOCK  # too little for all weights and states
    chosen = Chooser(predictions, fixed, 1, 0.0, streamed.host).fastest(memory)
    assert chosen is not None
    assert chosen.techniques.weights_on_host == "layers"
    assert Chooser(predictions, fixed, 1, 0.0, streamed.host - 1).fastest(memory) is None
    smallest = Chooser(predictions, fixed, 1, 0.0, streamed.host - 1).smallest()
    assert smallest.host < streamed.host


def counted(model: str, tokens: int, depth: int | None, **techniques: Any) -> dict[str, tuple[int, int]]:
    """For each phase of a step: predicted bytes, and those that fully_shard allocates on fake CUDA tensors."""
    from tests.support import streamed_bytes

    arguments = {"model": model, "tokens": tokens, "depth": depth, "techniques": Techniques(**FRUGAL | techniques)}
    by_phase: dict[str, tuple[int, int]] = fake_cuda.call(streamed_bytes.predicted_and_counted, **arguments)
    return by_phase


@pytest.mark.full
@needs_fake_cuda
@pytest.mark.parametrize(
    ("model", "tokens", "depth", "techniques"),
    first_full(
        [
            ("gpt2-xl", 1024, 12, {"checkpointing": "blocks"}),  # tied
            ("llama-3.1-8b", 8192, None, {"checkpointing": "blocks", "loss_chunk": 4096, "step_in_backward": True}),
            ("llama-3.1-8b", 256, 8, {"activation_bits": 3}),
        ],
    ),
    ids=["tied", "8B", "short"],
)
def test_what_fully_shard_allocates_is_predicted(
    model: str, tokens: int, depth: int | None, techniques: dict[str, Any]
) -> None:
    """Never less, and within 3 % of what a process has on the device."""
    process = DEFAULTS["cuda"].process
    by_phase = counted(model, tokens, depth, **techniques)
    predicted, real = (max(sizes) for sizes in zip(*by_phase.values(), strict=True))
    assert real + process <= predicted + process <= 1.03 * (real + process)
    assert all(predicted >= real for predicted, real in by_phase.values())
    if depth is None and model == "llama-3.1-8b":
        assert predicted + process < 12 * GIB
