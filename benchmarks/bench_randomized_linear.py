"""Times forward and backward passes of a linear layer of width 768 that saves a fifth of its input, beside torch's.

"saved" are the bytes that autograd saves for the backward pass, per element of the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import memory

from .harness import Case, Contender, Subject

WIDTH = 768


def contender(name: str, fn: Callable[..., Tensor], tokens: int, device: str, dtype: torch.dtype) -> Contender:
    def setup() -> Subject:
        torch.manual_seed(0)
        x, grad = (torch.randn(tokens, WIDTH, device=device).to(dtype) for _ in range(2))
        leaves = [
            x,
            torch.randn(WIDTH, WIDTH, device=device).to(dtype),
            torch.randn(WIDTH, device=device).to(dtype),
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        saved = memory.saved_bytes(lambda: fn(*leaves), leaves[1])
        # x, y and their gradients; the weight in both passes, and its gradient; what is saved is written and read.
        moved = 4 * x.nbytes + 3 * leaves[1].nbytes + 2 * saved
        return Subject(lambda: torch.autograd.grad(fn(*leaves), leaves, grad), lambda: moved, lambda: saved)

    return Contender(name, setup)


def ours(projection: str) -> Callable[..., Tensor]:
    from memkern.functional import randomized_linear

    return lambda *leaves: randomized_linear(*leaves, projection=projection, min_tokens=0)


def cases(size: int, device: str) -> list[Case]:
    def case(name: str, projections: tuple[str, ...], tokens: int, dtype: torch.dtype) -> Case:
        fns = {f"memkern RandomizedLinear {name}": ours(name) for name in projections}
        fns["torch Linear"] = F.linear
        contenders = [contender(title, fn, tokens, device, dtype) for title, fn in fns.items()]
        return Case(name, tokens * WIDTH, contenders)

    tokens = size // WIDTH
    return [
        case("linear 768, fp32", ("rows", "dct"), tokens, torch.float32),
        case("linear 768, bf16", ("rows", "dct"), tokens, torch.bfloat16),
        case("linear 768, fp32, 4,096 tokens", ("rows", "dct"), min(tokens, 4096), torch.float32),
    ]
