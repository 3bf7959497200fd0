"""Estimates the time of a step from its operations, memory traffic and transfers, to compare techniques."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..techniques.options import Techniques

if TYPE_CHECKING:
    from .fake_step import StaticBytes


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Speeds in operations and bytes per second, and the bytes of a process.

    process: what a process has before it holds a tensor: on a GPU the context and the workspaces of the libraries, on
    the CPU the interpreter with torch and transformers.
    """

    flops: float  # of matrix products in fp32
    half_flops: float  # in bf16 or fp16
    bandwidth: float  # of the device's memory
    link: float  # between the host's memory and the device's
    host_bandwidth: float  # of the host's memory
    process: int


DEFAULTS = {
    # A card of 12 GB: 13 TFLOP/s in fp32, 50 in bf16, half of which matrix products reach; PCIe 4.0 x16 at 25 GB/s.
    "cuda": Hardware(flops=8e12, half_flops=25e12, bandwidth=360e9, link=25e9, host_bandwidth=30e9, process=768 << 20),
    # Two cores with AVX-512 and AMX. The process is that of python -m memkern train, measured at 0.55 GiB.
    "cpu": Hardware(flops=150e9, half_flops=500e9, bandwidth=35e9, link=35e9, host_bandwidth=35e9, process=576 << 20),
}

COMPILED: dict[str, dict[int | str | None, float]] = {
    "cuda": {None: 0.6, "exact": 0.6, 8: 0.75},
    "cpu": {None: 0.95, "exact": 0.95, 8: 1.05},
}
"""The time of both passes with compiled blocks as a share of that without, by device and ``saved_bits``: about the mean
of GPT-2's and Llama's rows in README.md's tables."""


def default(device: str) -> Hardware:
    """The speeds of ``DEFAULTS``; on a CPU without bf16 instructions bf16 has the speed of fp32."""
    import torch

    hardware = DEFAULTS[device]
    if device == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return dataclasses.replace(hardware, half_flops=hardware.flops)
    return hardware


def seconds(
    hardware: Hardware,
    techniques: Techniques,
    sizes: StaticBytes,
    *,
    tokens: int,
    attention: float,
    compiled: float,
    brought: int,
) -> float:
    """Seconds of an optimizer step.

    Both passes take 6 N D operations for N parameters and D tokens, and those of attention: a third each for the
    forward pass, the gradients of the activations and those of the weights. Checkpoints repeat the forward pass,
    randomized linear layers compute their share of the weights' gradients, a loss in chunks computes the logits once
    more. The optimizer's step reads and writes weights, errors and states and reads gradients.

    With ``offload="cpu"`` gradients and weights go over the link to the host, and weights back. With "device" errors
    and states come to the device while others go back, which overlaps the step, or a backward pass that steps. With
    ``weights_on_host`` each pass copies the weights to the device, and the backward pass the gradients to the host. A
    step in backward overlaps that pass then, but never takes less time than a step on the device.

    tokens: of a sequence. attention: operations per token of the products of queries, keys, probabilities and values in
    a forward pass. compiled: ``COMPILED``'s share of the time of both passes. brought: bytes of weights that each pass
    copies from the host.
    """
    rate = hardware.flops if techniques.precision == "fp32" else hardware.half_flops
    passes = 3.0 + (1 / techniques.checkpoint_every if techniques.checkpointing else 0)
    if techniques.linear_share is not None:
        passes -= 1 - techniques.linear_share
    forward = compiled * techniques.micro_batch * tokens * (2 * sizes.count + attention) / rate
    micro_batch = passes * forward
    if techniques.loss_chunk:
        micro_batch += techniques.micro_batch * tokens * 2 * sizes.head / rate
    backward = (passes - 1) * forward
    # Weights come in each pass. Gradients leave at the same time, in the link's other direction.
    for computation in (forward, backward):
        micro_batch += max(0.0, brought / hardware.link - computation)
    total = techniques.accumulation * micro_batch
    on_host = techniques.offload == "cpu" or bool(techniques.weights_on_host)
    bandwidth = hardware.host_bandwidth if on_host else hardware.bandwidth
    accumulation_bandwidth = hardware.host_bandwidth if techniques.weights_on_host else hardware.bandwidth
    weights = gradients = sizes.parameters
    total += (techniques.accumulation - 1) * 3 * gradients / accumulation_bandwidth
    step = 3 * weights + 2 * (sizes.optimizer + sizes.errors)  # weights and states in and out, gradients in
    hidden = backward if techniques.weights_on_host and techniques.step_in_backward else 0.0
    total += max(step / bandwidth - hidden, step / hardware.bandwidth)
    if techniques.offload == "device":
        overlapped = step / hardware.bandwidth + (backward if techniques.step_in_backward else 0.0)
        total += max(0.0, (sizes.optimizer + sizes.errors) / hardware.link - overlapped)
    if techniques.offload == "cpu":
        total += (techniques.accumulation * gradients + 2 * weights) / hardware.link
    return total
