"""One call of each hot kernel, for ncu (profile.py): ``python -m tests.gpu.hot [elements as a power of two]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memkern import _ops, optim
from memkern.fewbit.tables import LEVELS
from memkern.quant.codec import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("AdamW8bit", "Lion8bit", "LAMB8bit", "LARS8bit")),
    ("AdamW", {"state_bits": (8, 4)}),
)


def calls(elements: int, device: str) -> list[Callable[[], object]]:
    """Warm: states and tables are there."""
    found: list[Callable[[], object]] = []
    table = LEVELS["gelu", 3]
    for dtype in DTYPES:
        x = torch.randn(elements, device=device).to(dtype)
        for name, options in STEPS:
            param = torch.nn.Parameter(x.clone().view(-1, 4096))
            param.grad = torch.randn_like(param) * 1e-3
            optimizer = getattr(optim, name)([param], lr=1e-3, weight_decay=0.1, **options)
            found.append(optimizer.step)
        norm = torch.zeros((), dtype=torch.float64, device=device)
        codes = _ops.few_bit_encode(x, table)
        found += [
            lambda x=x: _ops.few_bit_forward(x, ACTIVATIONS["gelu"], 0.0, 0.0, table),
            lambda x=x, codes=codes: _ops.few_bit_backward(x, codes, table.levels),
            lambda x=x, norm=norm: _ops.grad_norm_(norm, [x], None),
            lambda x=x: _ops.quantize_blockwise(x, "power", True, 128, None),
        ]
    for call in found:
        call()
    return found


def main() -> None:
    elements, device = 2 ** int(sys.argv[1] if len(sys.argv) > 1 else 26), "cuda"
    todo = calls(elements, device)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in todo:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
