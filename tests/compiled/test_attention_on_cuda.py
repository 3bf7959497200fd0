"""In graphs with 8-bit codes CUDA's attention kernels save their inputs as codes and run again.

The graphs are of fake CUDA tensors, in a process that has them: memkern cuts them, nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memkern.planner import fake_cuda
from tests.support.partitioned import backend

from .blocks import Block

aten = torch.ops.aten
TOKENS, WIDTH, HEADS = 256, 128, 2
ROWS = 2 * TOKENS


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, False)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout)[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, dropout)[0]


# query, key, value, an additive mask (flash attention is causal by a flag instead), dropout: the output
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}
# name: kernel, saved bits and dropout of the attention, arguments of graphs()
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{kernel}, {bits}": (kernel, bits) for kernel in KERNELS for bits in (None, "exact", 8)},
    "flash, dropout": ("flash", 8, 0.1),
}


class Layer(Block):
    """A block whose attention is one of KERNELS."""

    def __init__(self, kernel: str, attention_dropout: float) -> None:
        super().__init__(WIDTH, WIDTH // HEADS)
        self.kernel, self.attention_dropout = KERNELS[kernel], attention_dropout

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).tril()
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype).expand(q.shape[0], HEADS, -1, -1)
        return self.kernel(q, k, v, mask, self.attention_dropout)


def graphs(kernel: str, bits: Any, dropout: float = 0.0) -> dict[str, Any]:
    """Counts in a layer's two graphs.

    "saved": bytes of what the forward graph computes and saves, by dtype; "recomputed": how often the backward graph
    runs attention's forward pass; "ops": memkern's ops that both call.
    """
    torch._dynamo.reset()
    counts: dict[str, Any] = {"saved": {}}

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        counts["recomputed"] = sum(f"{kernel}_attention.default" in str(node.target) for node in bw.graph.nodes)
        targets = [node.target for graph in (fw, bw) for node in graph.graph.nodes]
        counts["ops"] = sorted(str(x) for x in targets if getattr(x, "namespace", "") == "memkern")
        for node in fw.graph.output_node().args[0][returned:]:  # type: ignore[index]
            x = node.meta["val"]
            if node.op == "call_function" and isinstance(x, Tensor):
                key = str(x.dtype).removeprefix("torch.")
                counts["saved"][key] = counts["saved"].get(key, 0) + x.numel() * x.element_size()

    no_random_state = mock.patch.object(torch.cuda, "is_available", return_value=False)
    with no_random_state, FakeTensorMode():
        with torch.device("cuda"):
            model, x = Layer(kernel, dropout), torch.randn(2, TOKENS, WIDTH)
        torch.compile(lambda x: model(x).square().mean(), backend=backend(bits, look), fullgraph=True)(x).backward()
    return counts


def all_graphs() -> dict[str, dict[str, Any]]:
    return {name: graphs(*case) for name, case in CASES.items()}


pytestmark = [
    pytest.mark.full,  # 12 seconds in a process of its own
    pytest.mark.skipif(
        fake_cuda.why_not() is not None and not torch.cuda.is_available(),
        reason="no GPU, which a torch built for one asks for; fake CUDA is for others, with a C++ compiler",
    ),
]


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    of_all: dict[str, dict[str, Any]] = fake_cuda.call(all_graphs)
    return of_all


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_coded_and_runs_again(counted: dict[str, dict[str, Any]], kernel: str) -> None:
    plain, exact, coded = (counted[f"{kernel}, {bits}"] for bits in (None, "exact", 8))
    assert [g["recomputed"] for g in (plain, exact, coded)] == [0, 0, 1]
    assert coded["ops"] == []  # codes are for Inductor to compile
    assert sum(exact["saved"].values()) < sum(plain["saved"].values())
    # queries, keys, values, inputs of two norms and of gelu, and the output, whose square is the loss
    assert coded["saved"]["int8"] == ROWS * WIDTH * (3 + 2 + 4 + 1)
    assert coded["saved"]["float32"] < 0.1 * ROWS * WIDTH * 4
    assert sum(coded["saved"].values()) < 0.2 * sum(plain["saved"].values())


def test_attention_with_dropout_stays_exact(counted: dict[str, dict[str, Any]]) -> None:
    with_dropout = counted["flash, dropout"]
    assert with_dropout["recomputed"] == 0
    assert with_dropout["saved"]["int8"] == ROWS * WIDTH * (2 + 4 + 1)
    assert with_dropout["saved"]["float32"] >= ROWS * (4 * WIDTH + HEADS) * 4  # and the log-sum-exp
