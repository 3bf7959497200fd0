"""Estimates the time of a step from its operations, memory traffic and transfers, to compare techniques."""

from __future__ import annotations

import dataclasses
import math

from ..options import Techniques


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Speeds in operations and bytes per second. link: between the host's memory and the device's.

    process: bytes that a process has before it holds a tensor: on a GPU the context and the workspaces of the
    libraries, on the CPU the interpreter with torch and transformers.
    """

    flops: float
    half_flops: float
    bandwidth: float
    link: float
    host_bandwidth: float
    process: int


LINKS = {"pcie4": 25e9, "pcie5": 50e9, "c2c": 360e9}
"""Bytes per second in one direction: four fifths of the nominal rates of PCIe 4.0 and 5.0 x16 and of NVLink-C2C."""

DEFAULTS = {
    # A card of 12 GB: 13 TFLOP/s in fp32, 50 in bf16, half of which matrix products reach.
    "cuda": Hardware(8e12, 25e12, 360e9, LINKS["pcie4"], 30e9, 768 << 20),
    # Two cores with AVX-512 and AMX. The process is that of python -m memkern train, measured at 0.55 GiB.
    "cpu": Hardware(0.15e12, 0.5e12, 35e9, 35e9, 35e9, 576 << 20),
}


def default(device: str) -> Hardware:
    """The speeds of ``DEFAULTS``; on a CPU without bf16 instructions bf16 has the speed of fp32."""
    import torch

    hardware = DEFAULTS[device]
    if device == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return dataclasses.replace(hardware, half_flops=hardware.flops)
    return hardware


def rate_of(hardware: Hardware, techniques: Techniques) -> float:
    """Operations per second of the matrix products."""
    return hardware.flops if techniques.precision == "fp32" else hardware.half_flops


def passes_of(techniques: Techniques) -> float:
    """Forward pass, gradients of activations and of weights; blocks with a checkpoint run forward twice."""
    passes = 3.0
    if techniques.checkpointing:
        passes += 1 / techniques.checkpoint_every
    if techniques.linear_share is not None:
        passes -= 1 - techniques.linear_share
    return passes


def seconds(
    hardware: Hardware,
    techniques: Techniques,
    *,
    parameters: int,
    head: int,
    tokens: int,
    saved: int,
    weight_bytes: int,
    state_bytes: int,
    attention: float = 0.0,
    brought: int = 0,
) -> float:
    """Seconds of an optimizer step.

    6 N D operations for N parameters and D tokens, and those of attention: a third each for the forward pass, the
    gradients of the activations and those of the weights. Checkpoints repeat the forward pass, randomized linear layers
    compute their share of the weights' gradients, a loss in chunks computes the logits once more. ``saved_bits`` reads
    and writes what is saved once more in each pass. The step reads and writes weights, errors and states and reads
    gradients; with offload gradients and weights go over the link, and weights back. With ``weights_on_host`` both
    passes bring the weights, and the backward pass sends the gradients the other way; the host's step takes the time
    that the backward pass does not hide, which hides nothing without a step in backward. It is never counted as less
    than a step on the device.

    head: parameters of the output layer. saved: bytes that a micro-batch saves for the backward pass without any
    technique. state_bytes: of the optimizer and of the errors. attention: operations per token of the products of
    queries, keys, probabilities and values in a forward pass.
    brought: bytes of weights that each pass brings from the host.
    """
    passes = passes_of(techniques)
    rate = rate_of(hardware, techniques)
    of_a_pass = techniques.micro_batch * tokens * (2 * parameters + attention) / rate
    micro_batch = passes * of_a_pass
    if techniques.loss_chunk:
        micro_batch += techniques.micro_batch * tokens * 2 * head / rate
    backward = (passes - 1) * of_a_pass
    # Weights come in in each pass, and gradients leave beside them, in the link's other direction.
    for hides in (of_a_pass, backward):
        micro_batch += max(0.0, brought / hardware.link - hides)
    total = techniques.accumulation * micro_batch
    if techniques.saved_bits:
        total += techniques.accumulation * 2 * saved / hardware.bandwidth
    gradients = weight_bytes
    on_host = techniques.offload or bool(techniques.weights_on_host)
    bandwidth = hardware.host_bandwidth if on_host else hardware.bandwidth
    accumulates = hardware.host_bandwidth if techniques.weights_on_host else hardware.bandwidth
    total += (techniques.accumulation - 1) * 3 * gradients / accumulates
    step = step_bytes(weight_bytes, state_bytes)
    hidden = backward if techniques.weights_on_host and techniques.step_in_backward else 0.0
    total += max(step / bandwidth - hidden, step / hardware.bandwidth)
    if techniques.offload:
        total += (techniques.accumulation * gradients + 2 * weight_bytes) / hardware.link
    return total


def step_bytes(weight_bytes: int, state_bytes: int) -> int:
    """Bytes that a step reads and writes: weights and states (errors among them) in and out, gradients in."""
    return 3 * weight_bytes + 2 * state_bytes


def intensity(
    techniques: Techniques, *, parameters: int, tokens: int, weight_bytes: int, saved: int, attention: float
) -> float:
    """Operations per byte of a micro-batch's passes, as the roofline model (Williams et al. 2009) has them.

    The bytes are the least that the passes move: each reads the weights, the last writes their gradients, and what is
    ``saved`` is written in the forward pass and read in the backward pass. The operations are those of
    :func:`seconds`.
    """
    passes = passes_of(techniques)
    operations = passes * techniques.micro_batch * tokens * (2 * parameters + attention)
    return operations / ((passes + 1) * weight_bytes + 2 * saved)


def streamed_from(
    hardware: Hardware, techniques: Techniques, *, parameters: int, attention: float, brought: int, step: int
) -> tuple[int, int]:
    """Tokens of a micro-batch from which its arithmetic takes as long as bringing the weights, and as the host's step.

    A forward pass brings ``brought`` bytes. The backward pass brings them again, sends as many the other way, and has
    more arithmetic. The host's step reads and writes ``step`` bytes beside the backward pass. attention: operations per
    token, as for :func:`seconds`.
    """
    a_token = (2 * parameters + attention) / rate_of(hardware, techniques)  # seconds of a forward pass
    backward = (passes_of(techniques) - 1) * a_token
    return math.ceil(brought / hardware.link / a_token), math.ceil(step / hardware.host_bandwidth / backward)
