"""Counts what graphs of a transformer's layer save on a GPU, by attention kernel: memkern cuts them, nothing runs.

The tensors are fake CUDA tensors: call it in a process that has them (memkern.planner.fake_cuda.call).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.support.partitioned import backend

aten = torch.ops.aten
TOKENS, WIDTH, HEADS = 256, 128, 2


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


class _Layer(nn.Module):
    """Attention by one of KERNELS and an MLP, each after a layer norm; returns a loss."""

    def __init__(self, kernel: str, dropout: float) -> None:
        super().__init__()
        self.kernel, self.dropout = KERNELS[kernel], dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype).expand(x.shape[0], HEADS, -1, -1)
        x = x + self.out(self.kernel(q, k, v, mask, self.dropout).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).detach().argmax(-1))


def _attention_calls(graph: fx.Graph, kind: str) -> int:
    """How often a graph runs the forward pass of an attention kernel."""
    return sum(f"{kind}_attention.default" in str(node.target) for node in graph.nodes)


def _is_op_of_memkern(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "memkern"


def graphs(kernel: str, bits: Any, dropout: float = 0.0) -> dict[str, Any]:
    """Counts in a layer's two graphs.

    "saved": bytes of what the forward graph computes and saves, by dtype; "recomputed": how often the backward graph
    runs attention's forward pass; "ops": memkern's ops that both call.
    """
    torch._dynamo.reset()
    counts: dict[str, Any] = {"saved": {}}

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        counts["recomputed"] = _attention_calls(bw.graph, kernel)
        counts["ops"] = sorted(str(n.target) for g in (fw, bw) for n in g.graph.nodes if _is_op_of_memkern(n))
        for node in fw.graph.output_node().args[0][returned:]:  # type: ignore[index]
            x = node.meta["val"]
            if node.op == "call_function" and isinstance(x, Tensor):
                key = str(x.dtype).removeprefix("torch.")
                counts["saved"][key] = counts["saved"].get(key, 0) + x.numel() * x.element_size()

    no_random_state = mock.patch.object(torch.cuda, "is_available", return_value=False)
    with no_random_state, FakeTensorMode():
        with torch.device("cuda"):
            model, x = _Layer(kernel, dropout), torch.randn(2, TOKENS, WIDTH)
        torch.compile(model, backend=backend(bits, look), fullgraph=True)(x).backward()
    return counts


def all_graphs(cases: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    return {name: graphs(*case) for name, case in cases.items()}
