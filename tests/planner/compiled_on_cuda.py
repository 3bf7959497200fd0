"""What compiled blocks save on fake CUDA tensors. For a process with fake CUDA."""

from __future__ import annotations

from typing import Any

from memkern.options import Techniques
from memkern.planner import fake_step
from memkern.planner.models import resolve


def saved(cases: list[dict[str, Any]]) -> list[int]:
    import transformers

    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=128, n_positions=256, vocab_size=100)
    source = resolve(config, 256, None, None, 0.1)
    return [fake_step.trace(source, Techniques(**case), "cuda").saved for case in cases]
