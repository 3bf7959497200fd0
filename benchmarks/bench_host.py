"""Times optimizer steps on the CPU, as they are taken where weights and states are offloaded to the host.

memkern's AdamW8bit steps bf16 weights whose rounding errors are kept in 8 bits. Beside it are torch's fused AdamW and
DeepSpeed's CPUAdam, ZeRO-Offload's optimizer: with fp32 weights, bf16 weights and fp32 states, and all in bf16.
ZeRO-Offload's conversions of gradients to fp32 and of weights to bf16 are not counted. Clipping is to a norm of 1:
memkern's by ``max_grad_norm``, the others' by torch's ``clip_grad_norm_``, which reads the gradients, then reads and
writes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .bench_optim import Make, clipped, optimizer_of, stepper
from .harness import Case, Contender

BF16, FP32 = torch.bfloat16, torch.float32
PEERS: dict[str, tuple[Make, torch.dtype]] = {
    "DeepSpeed CPUAdam, fp32": (optimizer_of("deepspeed.ops.adam", "DeepSpeedCPUAdam"), FP32),
    "DeepSpeed CPUAdam, bf16 with fp32 states": (optimizer_of("deepspeed.ops.adam", "DeepSpeedCPUAdam"), BF16),
    "DeepSpeed CPUAdam, all bf16": (
        optimizer_of("deepspeed.ops.adam", "DeepSpeedCPUAdam", fp32_optimizer_states=False),
        BF16,
    ),
    "torch AdamW fused, fp32": (optimizer_of("torch.optim", "AdamW", fused=True), FP32),
    "torch AdamW fused, all bf16": (optimizer_of("torch.optim", "AdamW", fused=True), BF16),
}


def cases(size: int, device: str) -> list[Case]:
    shapes = [(max(1, size // 4096), 4096)]
    numel = math.prod(shapes[0])

    def case(name: str, norm: float | None) -> Case:
        def options(passes: int) -> dict[str, Any]:
            """Options of a contender that reads or writes the gradients ``passes`` times to clip them."""
            return {"shapes": shapes, "device": device, "reads": lambda params, state: passes * params if norm else 0}

        ours = optimizer_of("memkern.optim", "AdamW8bit", master_weights="bf16+8", max_grad_norm=norm)
        contenders: list[Contender] = [stepper("memkern AdamW8bit, bf16+8", ours, dtype=BF16, **options(1))]
        for peer, (make, dtype) in PEERS.items():
            if device == "cpu" or not peer.startswith("DeepSpeed"):
                contenders.append(stepper(peer, clipped(make) if norm else make, dtype=dtype, **options(3)))
        return Case(name, numel, contenders)

    return [case("AdamW on the host", None), case("AdamW on the host, clipped to a norm", 1.0)]
