"""Symbolic sizes: what a graph saves does not depend on the sizes of the call that it was made for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from tests.support.partitioned import backend

WIDTH = 64


class Block(nn.Module):
    """x: of shape (batch, tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 32)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Block):
    """Attention whose probabilities are saved."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v


class Frozen(Block):
    """Few bits are for the activation before a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down.requires_grad_(False)


CASES: dict[str, tuple[type[Block], dict[str, Any], tuple[str, ...]]] = {
    "8 bits": (Block, {"bits": 8}, ("quantize_blockwise",)),
    "exact": (Block, {"bits": "exact"}, ()),
    "half": (Block, {"bits": 8, "memory_budget": 0.5}, ("quantize_blockwise",)),
    "by hand, 8 bits": (ByHand, {"bits": 8}, ("quantize_blockwise", "few_bit_encode")),
    "by hand, products again": (ByHand, {"bits": "exact", "memory_budget": 0.1}, ()),
    "few bits": (Frozen, {"bits": 8, "activations": 3}, ("quantize_blockwise", "few_bit_encode")),
}
THEN = (8, 300)


def graphs(model: nn.Module, first: tuple[int, int], **options: Any) -> list[str]:
    """Those of a call, after a first one."""
    torch._dynamo.reset()
    found: list[str] = []

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        found[:] = fw.code, bw.code

    compiled = torch.compile(model, backend=backend(look=look, **options), dynamic=True)
    for sizes in (first, THEN):
        compiled(torch.randn(*sizes, WIDTH, requires_grad=True)).square().mean().backward()
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:a compiled graph saves")
def test_the_first_sizes_do_not_decide(name: str) -> None:
    make, options, codes = CASES[name]
    model = make()
    small, large = (graphs(model, sizes, **options) for sizes in ((2, 3), THEN))
    assert small == large
    assert {each for each in ("quantize_blockwise", "few_bit_encode") if f"memkern.{each}" in large[0]} == {*codes}


def test_codes_do_not_depend_on_a_small_first_call() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    small, large = (graphs(model, sizes, bits=8) for sizes in ((2, 3), THEN))
    assert small == large
    assert "memkern.quantize_blockwise" in small[0]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_mean_of_few_has_a_graph_of_its_own() -> None:
    """Of many elements each is a small part of a mean, so that their codes may be coarse; not so of few."""
    torch._dynamo.reset()
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def normalized(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        return (h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-6) @ w).square().mean()

    compiled = torch.compile(normalized, backend=backend(8), dynamic=True)
    for rows, number in ((100, 1), (64, 1), (4, 2), (8, 2)):
        compiled(w, torch.randn(rows, WIDTH)).backward()
        assert counters["stats"]["unique_graphs"] == number


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_a_budget_in_bytes_is_kept_as_sizes_change() -> None:
    torch._dynamo.reset()
    model, saved = Block(), {}
    compiled = torch.compile(model, backend=backend(8, memory_budget=600_000), dynamic=True)
    given = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in given:
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    for tokens, number in ((60, 1), (64, 1), (33, 1), (100, 2), (120, 2), (40, 2)):
        x = torch.randn(2, tokens, WIDTH)
        given.add(x.untyped_storage()._cdata)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            loss = compiled(x).sum()
        loss.backward()
        assert sum(saved.values()) <= 600_000
        assert counters["stats"]["unique_graphs"] == number


STEP = """
import sys, torch, memkern
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
call = memkern.compile(model, saved_bits=8, dynamic=True)
for rows in map(int, sys.argv[1:]):
    x = torch.randn(rows, 64)
    saved = memkern.memory.saved_bytes(lambda: call(x).sum(), x)
print(saved)
"""


@pytest.mark.full
def test_another_process_with_a_small_first_call(tmp_path: Path) -> None:
    """torch's cache on disk has graphs for all sizes."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    saved = []
    for rows in (["3"], ["2048"], ["3", "2048"]):
        run = subprocess.run(
            [sys.executable, "-c", STEP, *rows], env=environment, capture_output=True, text=True, check=True
        )
        saved.append(int(run.stdout))
    assert saved[1] == saved[2] < 1.2 * 2048 * 64 * 2
