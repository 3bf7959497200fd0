"""memkern.saved.rules: every row of the table computes what torch computed, and nothing else is recomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern import functional, memory
from memkern.functions.saves_input import Recompute
from memkern.saved import rules
from memkern.saved.bases import base
from memkern.saved.edge import Edge
from memkern.saved.users import operation

N, W = 32, 64
NORM = nn.LayerNorm(W)
EMBEDDING = nn.Embedding(N, W)
nn.init.normal_(NORM.weight)
nn.init.normal_(NORM.bias)
INDICES = torch.arange(N).flip(0)
MASK = (torch.rand(N, W) > 0.1).float() / 0.9

Function = Callable[[Tensor], Tensor]

# The node that a rule is for, and an expression whose last operation makes it.
CASES: dict[str, Function] = {
    "AliasBackward0": lambda x: torch.ops.aten.alias(x),
    "ViewBackward0": lambda x: x.view(2, -1),
    "UnsafeViewBackward0": lambda x: torch.ops.aten._unsafe_view(x, [2, N * W // 2]),
    "ReshapeAliasBackward0": lambda x: torch.ops.aten._reshape_alias(x, [2, N * W // 2], [N * W // 2, 1]),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(-2),
    "SqueezeBackward0": lambda x: x.view(1, N, W).squeeze(),
    "SqueezeBackward1": lambda x: x.view(1, N, W).squeeze(0),
    "SqueezeBackward2": lambda x: x.view(1, N, 1, W).squeeze((0, 2)),
    "TBackward0": lambda x: x.t(),
    "TransposeBackward0": lambda x: x.transpose(0, -1),
    "PermuteBackward0": lambda x: x.view(N, 8, 8).permute(2, 0, -2),
    "ExpandBackward0": lambda x: x.unsqueeze(1).expand(N, 3, W),
    "SliceBackward0": lambda x: x[:, 3:-4:2],
    "SplitBackward0": lambda x: x.split(20, -1)[-1],
    "SplitWithSizesBackward0": lambda x: x.split([40, 20, 4], -1)[1],
    "SelectBackward0": lambda x: x.select(-1, 3),
    "UnbindBackward0": lambda x: x.unbind(-1)[5],
    "CloneBackward0": lambda x: x.t().contiguous(),
    "ToCopyBackward0": lambda x: x.bfloat16(),
    "EmbeddingBackward0": lambda x: EMBEDDING(INDICES),
    "IndexBackward0": lambda x: x[:, INDICES],
    "CatBackward0": lambda x: torch.cat((x[:, :8], x[:, 20:]), -1),
    "NegBackward0": lambda x: -x,
    "AddBackward0": lambda x: torch.add(x, x, alpha=3),
    "SubBackward0": lambda x: torch.sub(x, x, alpha=3),
    "MulBackward0": lambda x: x * MASK,
    "MulBackward1": lambda x: torch.ops.aten.mul.Scalar(x, 2.5),
    "DivBackward0": lambda x: x / 3.0,
    "SiluBackward0": F.silu,
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "ReluBackward0": F.relu,
    "SigmoidBackward0": torch.sigmoid,
    "TanhBackward0": torch.tanh,
    "MishBackward0": F.mish,
    "HardswishBackward0": F.hardswish,
    "LeakyReluBackward0": lambda x: F.leaky_relu(x, 0.3),
    "memkern.Glu": functional.swiglu,
    "memkern.Recompute": lambda x: Recompute.apply(x, lambda t: t * torch.sigmoid(1.702 * t)),
    "NativeLayerNormBackward0": NORM,
    "SumBackward1": lambda x: x.view(N, 4, -1).sum(-2),
    "SoftmaxBackward0": lambda x: x.softmax(-1),
    "SafeSoftmaxBackward0": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "BmmBackward0": lambda x: torch.bmm(x.view(1, -1, 8), x.view(1, -1, 8).transpose(1, 2)),
}


def test_every_rule_has_a_case() -> None:
    # Of the fused RMS norm there is no CPU kernel with an autograd node of its own.
    assert set(CASES) == set(rules.RULES) - {"FusedRmsNormBackward0"}


ONES = torch.ones(64 * 64 * 64, 1)
FACTOR = torch.tensor([1.5])


def _used(x: Tensor) -> Tensor:
    """x is saved (by silu), and the graph shows what uses it: a product comes after it."""
    y = F.silu(x).float().reshape(1, -1)
    return (y @ ONES[: y.shape[1]]).cos()


def _run(function: Function, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """x is saved, and then what the function makes of it."""
    leaf.cos()  # saves the leaf: from here on its version is known
    x = leaf * FACTOR  # which is saved, so that the product is known to be of this session
    return _used(x), _used(function(x))


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    leaf = torch.randn(N, W, requires_grad=True)
    function = CASES[name]
    x = leaf * 1.5
    y = function(x)
    assert operation(y.grad_fn) == name
    extra = MASK.nbytes // 32 + 1024 if name == "MulBackward0" else 1024  # bits of a mask, rows' statistics
    results = []

    def forward() -> None:
        results[:] = _run(function, leaf)

    def exactly() -> None:
        with memkern.quantize_saved("exact"):
            forward()

    held = [leaf, ONES, *NORM.parameters(), *EMBEDDING.parameters(), INDICES]
    assert memory.saved_bytes(exactly, *held) <= x.nbytes + extra
    for run in (forward, exactly):
        run()
        gradient = torch.autograd.grad(sum(r.float().sum() for r in results), leaf, retain_graph=True)[0]
        if run is forward:
            expected = gradient
    if rules.RULES[name].exactness == "bits":
        assert torch.equal(gradient, expected)
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, rule in rules.RULES.items() if rule.uncoded])
def test_beside_codes_products_and_softmax_are_not_computed_anew(name: str) -> None:
    """The codes' errors of what goes into them would be larger than that of the output's own codes."""
    leaf = torch.randn(N, W, requires_grad=True)

    def forward() -> tuple[Tensor, Tensor]:
        with memkern.quantize_saved(8):
            return _run(CASES[name], leaf)

    y = CASES[name](leaf * 1.5)
    assert memory.saved_bytes(forward, leaf, ONES) >= y.numel() * (1 if name in rules.CODEC_BY_MAKER else 4)


def test_sums_over_many_and_small_products_are_saved() -> None:
    leaf = torch.randn(1, 64, 64, requires_grad=True)

    def saved(function: Function) -> int:
        def forward() -> tuple[Tensor, Tensor]:
            with memkern.quantize_saved("exact"):
                return _run(function, leaf)

        return memory.saved_bytes(forward, leaf, ONES, FACTOR)

    ones = 64 * 64 // 8 + 16  # in bits, and the results
    assert saved(lambda x: x.sum(-1)) <= 64 * 4 + ones
    assert 0 <= saved(lambda x: torch.bmm(x, x)) - leaf.nbytes <= ones


def test_frozen_affine_parameters_count() -> None:
    norm = nn.LayerNorm(W)
    for p in (norm.weight, norm.bias):
        nn.init.normal_(p.requires_grad_(False))
    leaf = torch.randn(N, W, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(sum(r.sum() for r in _run(norm, leaf)), leaf)[0]

    expected = gradient()
    with memkern.quantize_saved("exact"):
        torch.testing.assert_close(gradient(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, "exact"])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_comes_from_another_device_stays_where_it_is_used(bits: Any, is_leaf: bool) -> None:
    """Weights on the CPU that every forward pass moves to the device."""

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(W, W))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight if is_leaf else self.weight * 2
            return F.linear(x, weight.to("meta", torch.bfloat16).t())

    model = Moved()
    memkern.compress(model, saved_bits=bits)
    node = model(torch.randn(N, W, device="meta", dtype=torch.bfloat16, requires_grad=True)).grad_fn
    assert [x.device.type for x in (node._saved_self, node._saved_mat2)] == ["meta", "meta"]


@pytest.mark.parametrize("function", [lambda x: x.exp(), lambda x: x.sin(), lambda x: x.cumsum(0)])
def test_what_no_row_names_is_saved_as_torch_does(function: Function) -> None:
    leaf = torch.randn(N, W, requires_grad=True)
    grads = []
    for bits in (None, 8):
        with memkern.quantize_saved(bits) if bits else contextlib.nullcontext():
            y = function(leaf * 1.5)
            z = y.cos()
        grads.append(torch.autograd.grad(z.sum(), y)[0])
    assert torch.equal(*grads)


def test_the_root_of_a_view_is_what_it_was_made_of() -> None:
    x = torch.randn(4, N, W, requires_grad=True) * 1.0
    y = x.bfloat16().transpose(1, 2).unsqueeze(0).contiguous().permute(0, 3, 1, 2)
    edge, data = base(Edge(y.grad_fn, y.output_nr), y, views_only=False)
    assert edge.node is x.grad_fn
    assert torch.equal(data, x.bfloat16())


def test_what_the_rules_rest_on_in_torch() -> None:
    """If this fails with a new version of torch, hooks no longer see the graph.

    Gradients stay right, because a tensor without ``grad_fn`` is saved as torch does, but nothing is saved any more.
    Then find out what replaced ``grad_fn`` in the pack hook, ``_input_metadata``, ``metadata`` or ``_saved_*`` of a
    node, change memkern/saved/edge.py and registered() accordingly, and this test with it.
    """
    seen: list[Tensor] = []
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = (x * 2).view(12)
        y.cos()
        z = y.tanh()
    assert [t.grad_fn is y.grad_fn for t in seen[-2:]] == [True, False]
    assert seen[-1].grad_fn.name() == "TanhBackward0"
    assert seen[-1].output_nr == 0
    assert seen[-2]._base.grad_fn is y._base.grad_fn
    node = z.grad_fn
    assert node.next_functions == ((y.grad_fn, 0),)
    about = y.grad_fn._input_metadata[0]
    assert (tuple(about.shape), about.dtype, about.device.type) == ((12,), torch.float32, "cpu")
    node.metadata["memkern"] = 1
    assert z.grad_fn.metadata["memkern"] == 1
    assert x.t().grad_fn.name() == "TBackward0"
    assert x.transpose(0, 1).grad_fn._saved_dim0 == 0
    assert torch.autograd.graph.get_gradient_edge(x).node.name() == "torch::autograd::AccumulateGrad"
    assert torch.autograd.graph.get_gradient_edge(x).node.variable is x
    for missing in ("_current_graph_task_id",):
        assert hasattr(torch._C, missing)
    assert hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
