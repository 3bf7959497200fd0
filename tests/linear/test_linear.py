"""Randomized linear layers have torch's outputs, and its gradients but for the weight's, and save a share of tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memkern import memory
from memkern.functional import randomized_linear
from memkern.nn import RandomizedLinear
from tests.support.helpers import assert_same, name_of, over_dtypes
from tests.support.linear_helpers import inputs, over_projections

# ---- what is exact


@pytest.mark.pairwise
@over_projections
@over_dtypes
@pytest.mark.parametrize("shape", [(200, 24), (3, 67, 24), (2, 3, 5, 24)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_all_but_the_weight_gradient_is_torchs(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    x, weight, bias, grad = inputs(shape, 17, dtype)
    leaves = [x, weight, *([bias] if with_bias else [])]
    y = randomized_linear(*leaves, projection=name, min_tokens=0)
    expected = F.linear(*leaves)
    assert_same(y, expected)
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (y, expected))
    assert_same([ours[0], *ours[2:]], [theirs[0], *theirs[2:]])
    assert ours[1].dtype == dtype
    assert not torch.equal(ours[1], theirs[1])


@over_projections
def test_inputs_of_any_strides_give_the_same_results(name: str) -> None:
    x, weight, bias, grad = inputs((6, 40, 24), 17)
    permuted = x.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    results = []
    for x_ in (x, permuted):
        torch.manual_seed(0)
        y = randomized_linear(x_, weight, bias, projection=name)
        strided_grad = grad.repeat(1, 1, 2)[..., ::2].copy_(grad)
        results.append([y.detach(), *torch.autograd.grad(y, [x_, weight, bias], strided_grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# ---- saved bytes


@over_projections
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a_share_of_tokens_and_the_seed_are_saved(name: str, dtype: torch.dtype) -> None:
    layer = RandomizedLinear(64, 96, share=0.25, projection=name, dtype=dtype)
    x = torch.randn(4, 100, 64, dtype=dtype, requires_grad=True)
    assert memory.saved_bytes(lambda: layer(x)) == 100 * 64 * dtype.itemsize + 16  # 100 of 400 tokens, and the seed


def test_the_input_is_free_after_the_forward_pass() -> None:
    layer = RandomizedLinear(64, 64)
    norm = nn.LayerNorm(64, elementwise_affine=False)
    x = torch.randn(200, 64, requires_grad=True)
    # 40 of 200 tokens, the seed, and LayerNorm's means and deviations.
    assert memory.saved_bytes(lambda: layer(norm(x)), x) == 40 * 64 * 4 + 16 + 2 * 200 * 4


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_needed_is_kept_and_computed(needs: tuple[int, int, int]) -> None:
    tensors = inputs((200, 24), 16)
    x, weight, bias = (t.detach().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=False))
    leaves = [t for t in (x, weight, bias) if t.requires_grad]
    # The gradient of x needs the weight, that of the weight 40 of 200 tokens and the seed.
    expected_bytes = needs[0] * 4 * 24 * 16 + needs[1] * (4 * 40 * 24 + 16)
    run = lambda: randomized_linear(x, weight, bias)  # noqa: E731
    assert memory.saved_bytes(run) == expected_bytes
    if leaves:
        grads = torch.autograd.grad(run(), leaves, tensors[3])
        expected = torch.autograd.grad(F.linear(x, weight, bias), leaves, tensors[3])
        for leaf, a, b in zip(leaves, grads, expected, strict=True):
            assert a.shape == leaf.shape
            assert torch.equal(a, b) == (leaf is not weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_or_drawn_without_gradients(mode: Any) -> None:
    layer, x = RandomizedLinear(64, 64), torch.randn(200, 64)
    state = torch.get_rng_state()
    with mode():
        assert memory.saved_bytes(lambda: layer(x)) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [{"min_tokens": 201}, {"share": 1.0}, {"share": 0.999}],
    ids=["fewer tokens than min_tokens", "all are kept", "all are kept, rounded"],
)
def test_the_layer_is_torchs_where_nothing_would_be_saved(options: dict[str, Any]) -> None:
    x, weight, bias, grad = inputs((2, 100, 24), 16)
    assert_same(
        torch.autograd.grad(randomized_linear(x, weight, bias, **options), [x, weight, bias], grad),
        torch.autograd.grad(F.linear(x, weight, bias), [x, weight, bias], grad),
    )
    assert memory.saved_bytes(lambda: randomized_linear(x, weight, bias, **options), x, weight) == 0
    assert memory.saved_bytes(lambda: randomized_linear(x, weight, bias, min_tokens=200), x, weight) > 0


@pytest.mark.parametrize("shape", [(0, 24), (24,), (3, 0, 24)], ids=str)
def test_no_tokens_and_one_token(shape: tuple[int, ...]) -> None:
    x, weight, bias, grad = inputs(shape, 16)
    out = randomized_linear(x, weight, bias, min_tokens=0)
    expected = F.linear(x, weight, bias)
    assert_same(out, expected)
    assert_same(*(torch.autograd.grad(y, [x, weight, bias], grad) for y in (out, expected)))


@over_projections
def test_meta_tensors_have_shapes(name: str) -> None:
    layer = RandomizedLinear(15, 20, projection=name, device="meta")
    y = layer(torch.empty(200, 15, device="meta"))
    assert y.shape == (200, 20)
    y.sum().backward()
    assert layer.weight.grad.shape == (20, 15)


# ---- the module


def test_module_is_a_linear_with_the_same_state() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 16)
    torch.manual_seed(0)
    layer = RandomizedLinear(24, 16, share=0.5, projection="dct", min_tokens=64)
    assert_same(layer.state_dict(), plain.state_dict())
    assert "share=0.5, projection='dct'" in repr(layer)
    copied = copy.deepcopy(layer)
    assert (copied.share, copied.projection, copied.min_tokens) == (0.5, "dct", 64)
    assert RandomizedLinear(24, 16, bias=False).bias is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0.0"),
        ({"share": 1.5}, "share must be .*, got 1.5"),
        ({"share": math.nan}, "share must be .*, got nan"),
        ({"share": True}, "share must be .*, got True"),
        ({"projection": "fft"}, "projection must be one of 'rows', 'dct', got 'fft'"),
        ({"min_tokens": -1}, "min_tokens must be a whole number, 0 or more, got -1"),
        ({"min_tokens": 1.5}, "min_tokens must be a whole number, 0 or more, got 1.5"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    x, weight, _, _ = inputs((4, 24), 16)
    with pytest.raises(ValueError, match=message):
        randomized_linear(x, weight, **options)
    with pytest.raises(ValueError, match=message):
        RandomizedLinear(24, 16, **options)
