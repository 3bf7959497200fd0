"""torch.ops.memkern and torch.ops.memkern_reference refuse bad arguments, before anything is changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.quant.codec import ACTIVATIONS
from tests.support.bad_steps import BAD_CASES, BAD_STEPS, p
from tests.support.helpers import needs_cpp
from tests.support.interpreted import interpreted
from tests.support.op_helpers import NAMESPACES, SAMPLES, TABLE, op, over_namespaces, step_args


@interpreted(name=("adam_step_", "lion_step_"))
@over_namespaces
@pytest.mark.parametrize(("name", "case"), BAD_CASES)
def test_bad_steps_raise_before_anything_changes(namespace: str, name: str, case: str) -> None:
    args = step_args(name, ["codes", "codes"], **BAD_STEPS[case])
    before = [[t.clone() for t in a] for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        op(namespace, name)(*args)
    after = [a for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    for a, b in zip(after, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


X, CODES = p(4, 256), p(4, 256, dtype=torch.int8)
BAD_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "quantize, block size": ("quantize_blockwise", (X, 0, True, 12)),
    "quantize, block size 0": ("quantize_blockwise", (X, 0, True, 0)),
    "quantize, codec": ("quantize_blockwise", (X, 2, True, 128)),
    "quantize, fp64": ("quantize_blockwise", (X.double(), 0, True, 128)),
    "quantize, int": ("quantize_blockwise", (X.int(), 0, True, 128)),
    "quantize, gaps": ("quantize_blockwise", (X[:, ::2], 0, True, 128)),
    "dequantize, block size": ("dequantize_blockwise", (CODES, p(4, 2), 0, 20, torch.float32)),
    "dequantize, codec": ("dequantize_blockwise", (CODES, p(4, 2), -1, 128, torch.float32)),
    "dequantize, codes": ("dequantize_blockwise", (X, p(4, 2), 0, 128, torch.float32)),
    "dequantize, gaps": ("dequantize_blockwise", (CODES[:, ::2], p(4, 1), 0, 128, torch.float32)),
    "dequantize, scale shape": ("dequantize_blockwise", (CODES, p(8), 0, 128, torch.float32)),
    "dequantize, too few scales": ("dequantize_blockwise", (CODES, p(4, 1), 0, 128, torch.float32)),
    "dequantize, scale dtype": ("dequantize_blockwise", (CODES, p(4, 2).half(), 0, 128, torch.float32)),
    "norm, fp32": ("grad_norm_", (p(()), [X])),
    "norm of two numbers": ("grad_norm_", (p(2, dtype=torch.float64), [X])),
    "norm, int": ("grad_norm_", (p((), dtype=torch.float64), [X.int()])),
    "dequantize, fp64": ("dequantize_blockwise", (CODES, p(4, 2), 0, 128, torch.float64)),
}

PLANES = torch.zeros(3, 128, dtype=torch.uint8)  # codes for X, 3 bits each
TWO_BRANCH = SAMPLES["few_bit_backward_from_output"]["odd, torch.float32"]()[3:]
BAD_CALLS |= {
    "encode, no bits": ("few_bit_encode", (X, 0, [], [], 0)),
    "encode, 5 bits": ("few_bit_encode", (X, 5, [], [], 0)),
    "encode, a flip fewer": ("few_bit_encode", (X, 2, [0.5, 1.0], [1], 0)),
    "encode, too many": ("few_bit_encode", (X, 2, [0.5] * 65, [1] * 65, 0)),
    "encode, a flip of no plane": ("few_bit_encode", (X, 2, [0.5], [4], 0)),
    "encode, a negative flip": ("few_bit_encode", (X, 2, [0.5], [-1], 0)),
    "encode, symmetry": ("few_bit_encode", (X, 2, [0.5], [1], 3)),
    "encode, int": ("few_bit_encode", (X.int(), *TABLE)),
    "encode, gaps": ("few_bit_encode", (X[:, ::2], *TABLE)),
    "forward, no such function": ("few_bit_forward", (X, len(ACTIVATIONS), 0.0, 0.0, *TABLE)),
    "forward, gaps": ("few_bit_forward", (X[:, ::2], 0, 0.0, 0.0, *TABLE)),
    "backward, codes of less": ("few_bit_backward", (X, PLANES[:, :112].contiguous(), [0.5] * 8)),
    "backward, rows with gaps": ("few_bit_backward", (X, PLANES.repeat(1, 2)[:, ::2], [0.5] * 8)),
    "backward, five planes": ("few_bit_backward", (X, PLANES.repeat(2, 1)[:5], [0.5] * 32)),
    "backward, signed codes": ("few_bit_backward", (X, PLANES.to(torch.int8), [0.5] * 8)),
    "backward, a level fewer": ("few_bit_backward", (X, PLANES, [0.5] * 7)),
    "backward, gaps": ("few_bit_backward", (p(4, 512)[:, ::2], PLANES, [0.5] * 8)),
    "backward, int": ("few_bit_backward", (X.int(), PLANES, [0.5] * 8)),
    "output, two planes": ("few_bit_backward_from_output", (X, X, PLANES[:2], *TWO_BRANCH)),
    "output, another shape": ("few_bit_backward_from_output", (X, p(256, 4), PLANES[:1], *TWO_BRANCH)),
    "output, other strides": ("few_bit_backward_from_output", (X, p(256, 4).t(), PLANES[:1], *TWO_BRANCH)),
    "output, int": ("few_bit_backward_from_output", (X, X.int(), PLANES[:1], *TWO_BRANCH)),
    "output, a coefficient fewer": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], TWO_BRANCH[0], TWO_BRANCH[1][1:], *TWO_BRANCH[2:]),
    ),
    "output, no coefficients": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], TWO_BRANCH[0], [], [], *TWO_BRANCH[3:]),
    ),
}


@interpreted(case=[case for case in BAD_CALLS if "quantize" in case or "scaler" in case])
@over_namespaces
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise(namespace: str, case: str) -> None:
    name, args = BAD_CALLS[case]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        op(namespace, name)(*args)


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


# The reference is torch's own functions, which end the process.
over_kernels = pytest.mark.parametrize("namespace", [x for x in NAMESPACES if x != "memkern_reference"])
NO_MEMORY = "has no memory: its storage has been freed"


@interpreted()
@needs_cpp
@over_kernels
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("quantize_blockwise", (freed(X), 0, True, 128)),
        ("dequantize_blockwise", (freed(CODES), p(4, 2), 0, 128, torch.float32)),
        ("dequantize_blockwise", (CODES, freed(p(4, 2)), 0, 128, torch.float32)),
        ("grad_norm_", (p((), dtype=torch.float64), [freed(X)])),
        ("few_bit_encode", (freed(X), 1, [0.0], [1], 0)),
        ("few_bit_backward", (freed(X), PLANES[:1], [0.5, 1.0])),
        ("few_bit_backward", (X, freed(PLANES[:1]), [0.5, 1.0])),
    ],
)
def test_freed_memory_is_an_error(namespace: str, name: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        op(namespace, name)(*args)


@interpreted()
@needs_cpp
@over_kernels
@pytest.mark.parametrize("which", ["params", "grads", "moments", "scales", "steps"])
def test_a_step_on_freed_memory_is_an_error(namespace: str, which: str) -> None:
    args = step_args("lion_step_", ["codes", "codes"])
    tensors = getattr(args, which)
    tensors[1] = freed(tensors[1])
    before = args.params[0].clone()
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        op(namespace, "lion_step_")(*args)
    assert torch.equal(args.params[0], before)
