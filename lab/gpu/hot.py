"""One call of each hot kernel, for ncu (profile.py): ``python -m lab.gpu.hot [GROUP]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memkern import _ops, optim
from memkern.fewbit.activations import activation_of
from memkern.quant.codec import CODECS
from memkern.quant.layout import layout_of
from memkern.schemas import StepArgs

ELEMENTS = 2**26
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("AdamW8bit", "Lion8bit", "LAMB8bit", "LARS8bit")),
    ("AdamW8bit", {"codec": "dynamic"}),
)
ROW = 1600  # of GPT-2-XL: no whole blocks of 128
GROUPS = ("steps bf16", "steps fp32", "others bf16", "others fp32")
"""Each is a process for ncu, which tells what it found at the process's end."""


def calls(elements: int, device: str, group: str | None = None) -> list[Callable[[], object]]:
    """Warm: states and tables are there. ``group``: of GROUPS; all by default."""
    found: list[Callable[[], object]] = []
    for each in (group,) if group else GROUPS:
        kind, dtype = each.split()
        x = torch.randn(elements, device=device).to(DTYPES[dtype])
        found += steps(x) if kind == "steps" else others(x)
    for call in found:
        call()
    return found


def steps(x: torch.Tensor) -> list[Callable[[], object]]:
    def step(name: str, rows: int, **options: Any) -> Callable[[], object]:
        param = torch.nn.Parameter(x[: x.numel() // rows * rows].clone().view(-1, rows))
        param.grad = torch.randn_like(param) * 1e-3
        return getattr(optim, name)([param], lr=1e-3, weight_decay=0.1, **options).step

    found = [step(name, 4096, **options) for name, options in STEPS]
    return [*found, step("AdamW8bit", ROW), step("LAMB8bit", ROW), *muon(x)]


def muon(x: torch.Tensor) -> list[Callable[[], object]]:
    """Muon's two ops, without torch's products between them."""
    param = x[: x.numel() // 4096 * 4096].clone().view(-1, 4096)
    args = StepArgs(
        [param],
        [torch.randn_like(param) * 1e-3],
        moments=[torch.zeros_like(param, dtype=torch.int8)],
        scales=[torch.zeros(layout_of(param, 128).scale_shape, device=x.device)],
        steps=[torch.zeros((), device=x.device)],
        group=[0],
        lr=[torch.tensor(1e-3, dtype=torch.float64, device=x.device)],
        hyperparameters=[0.95, 1.0, 0.1, 0.0],
        codec=[CODECS["power"]],
        block_size=[128],
    )
    updates = [torch.empty_like(param, dtype=torch.bfloat16)]
    return [
        lambda: _ops.muon_momentum_(args, updates),
        lambda: _ops.muon_apply_(args, updates, [0.2]),
    ]


def others(x: torch.Tensor) -> list[Callable[[], object]]:
    gelu = activation_of("gelu", 3)
    norm = torch.zeros((), dtype=torch.float64, device=x.device)
    planes = _ops.few_bit_encode(x, gelu.levels)
    found: list[Callable[[], object]] = [
        lambda: _ops.few_bit_forward(x, gelu),
        lambda: _ops.few_bit_backward(x, planes, gelu.levels.levels),
        lambda: _ops.grad_norm_(norm, [x], None),
    ]

    def codec(name: str) -> list[Callable[[], object]]:
        codes, scale = _ops.quantize_blockwise(x, name, True, 128, None)
        return [
            lambda: _ops.quantize_blockwise(x, name, True, 128, None),
            lambda: _ops.dequantize_blockwise(codes, scale, name, 128, x.dtype),
        ]

    found += [*codec("power"), *codec("dynamic")]
    return found


def main() -> None:
    todo = calls(ELEMENTS, "cuda", sys.argv[1] if len(sys.argv) > 1 else None)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in todo:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
