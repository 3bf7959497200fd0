"""What the tests give to the ops of csrc/cuda/ as CPU programs: every layout, hard gradients, states of all kinds.

``python -m tests.support.simt.drive LIBRARY`` compares a smaller part with the reference:
tests/gpu/test_cuda_simt.py runs it with a library that sanitizers watch.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memkern import reference
from memkern.quant.layout import layout_of
from memkern.schemas import STEP_OPS, WEIGHT_STATES, StepArgs
from tests.support.activation_kernels import compare_activations
from tests.support.helpers import FLOATS, LAYOUTS, assert_same, hard, like, tensor
from tests.support.simt import build
from tests.support.step_lists import MOMENTS, pack

# Of two groups.
HYPERPARAMETERS: dict[str, dict[str, list[Any]]] = {
    "adam_step_": {
        "beta1": [0.9, 0.8], "beta2": [0.999, 0.9], "eps": [1e-8, 1e-6], "weight_decay": [0.1, 0.2],
        "decoupled_weight_decay": [1, 0], "maximize": [0, 1],
    },
    "lamb_step_": {
        "beta1": [0.9, 0.8], "beta2": [0.999, 0.9], "eps": [1e-8, 0.0], "weight_decay": [0.1, 0.0],
        "decoupled_decay": [1, 0], "bias_correction": [0, 1], "trust_clip": [0, 1], "always_adapt": [0, 1],
        "layers": [1, 1], "maximize": [0, 1],
    },
    "lars_step_": {
        "momentum": [0.9, 0.8], "dampening": [0.0, 0.0], "weight_decay": [0.1, 0.0], "nesterov": [0, 1],
        "trust_coeff": [0.0, 1e-2], "eps": [0.0, 1e-8], "trust_clip": [0, 1], "always_adapt": [0, 1],
        "layers": [1, 1], "maximize": [0, 1],
    },
    "lion_step_": {
        "beta1": [0.9, 0.8], "beta2": [0.999, 0.9], "weight_decay": [0.1, 0.2], "maximize": [0, 1]
    },
    "sgd_step_": {
        "momentum": [0.9, 0.8], "dampening": [0.5, 0.0], "weight_decay": [0.0, 0.1], "nesterov": [0, 1],
        "maximize": [0, 1],
    },
}  # fmt: skip
NON_FINITE = {3: torch.nan, 500: torch.inf, 700: -torch.inf}


def spoiled(x: Tensor) -> Tensor:
    """Some elements of longer tensors are not finite."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    for place, value in NON_FINITE.items():
        if x.numel() > 900:
            flat[place] = value
    return x


def step_args(
    name: str,
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    codec: tuple[int, int] = (0, 1),
    block_size: int = 128,
    layouts: Any = tuple(LAYOUTS),
    weights: tuple[int, int] = (0, 0),
    **override: Any,
) -> StepArgs:
    """A tensor of each layout or shape, every third with fp32 states, in two groups; ``codec``: theirs.

    ``weights``: the groups' weight_storage. ``override``: other hyperparameters.
    """
    params = [
        tensor(layout, param, seed=i, scale=0.1) if isinstance(layout, str) else hard(layout, i, scale=0.1).to(param)
        for i, layout in enumerate(layouts)
    ]
    coded = [i % 3 != 2 for i in range(len(params))]
    lists: dict[str, Any] = HYPERPARAMETERS[name] | override
    for moment, signed in zip(MOMENTS, STEP_OPS[name].moments.values(), strict=False):
        code = torch.int8 if signed else torch.uint8
        lists[f"{moment}s"] = [
            torch.zeros_like(p, dtype=code if c else torch.float32) for p, c in zip(params, coded, strict=True)
        ]
        lists[f"{moment}_scales"] = [
            torch.zeros(layout_of(p, block_size).scale_shape) for p, c in zip(params, coded, strict=True) if c
        ]
    return pack(
        name,
        lists
        | {
            "params": params,
            "grads": gradients(params, 1, grad),
            "steps": [torch.tensor(0.0) for _ in params],
            "trust_ratios": [torch.ones(1) for _ in params],
            "group": [i % 2 for i in range(len(params))],
            "lr": [torch.tensor(1e-2, dtype=torch.float64), torch.tensor(3e-3)],
            "codec": [*codec],
            "block_size": [block_size] * 2,
            "weight_storage": [*weights],
            "weight_states": [
                torch.zeros_like(p, dtype=getattr(torch, WEIGHT_STATES[weights[i % 2]]))
                for i, p in enumerate(params)
                if weights[i % 2] in WEIGHT_STATES
            ],
        },
    )


def gradients(params: Sequence[Tensor], seed: int, dtype: torch.dtype) -> list[Tensor]:
    return [spoiled(like(p, 100 * seed + i, dtype)) for i, p in enumerate(params)]


def scaler(**override: Any) -> dict[str, Any]:
    """A GradScaler's factor and a norm to clip to."""
    return {
        "grad_scale": torch.tensor(8.0),
        "found_inf": torch.tensor(0.0),
        "grad_norm": torch.tensor(3.0, dtype=torch.float64),
        "max_grad_norm": 1.0,
    } | override


def cloned(args: Any) -> Any:
    """A copy of an op's arguments that shares nothing with them and lies in memory alike."""
    if isinstance(args, dict):
        return {key: cloned(value) for key, value in args.items()}
    if isinstance(args, StepArgs):
        return StepArgs(*map(cloned, args))
    if isinstance(args, (list, tuple)):
        return [cloned(value) for value in args]
    return copy.deepcopy(args)  # a tensor with its storage, so at the same offset


def compare_steps(name: str, args: StepArgs, options: dict[str, Any], steps: int = 2) -> None:
    """Some steps of the kernels and of the reference, equal in every bit after each."""
    args = args._replace(**options)
    expected = cloned(args)
    dtype = args.grads[0].dtype
    for step in range(steps):
        getattr(torch.ops.memkern_simt, name)(*args)
        getattr(reference, name)(expected)
        assert_same([*args], [*expected], f"step {step}")
        grads = gradients(args.params, step + 2, dtype)
        args, expected = args._replace(grads=grads), expected._replace(grads=grads)


def compare_codecs(layout: str, dtype: torch.dtype, block_sizes: tuple[int, ...]) -> None:
    ops = torch.ops.memkern_simt
    kinds = itertools.product((0, 1), (True, False), block_sizes, ((None, False), (7, False), (None, True)))
    for codec, signed, block_size, (step, marked) in kinds:
        x = spoiled(tensor(layout, dtype))
        expected = reference.quantize_blockwise(x, codec, signed, block_size, step, marked)
        what = f"codec {codec}, signed {signed}, block_size {block_size}, step {step}, marked {marked}"
        assert_same([*ops.quantize_blockwise(x, codec, signed, block_size, step, marked)], [*expected], what)
        for out in FLOATS:
            actual = ops.dequantize_blockwise(*expected, codec, block_size, out)
            assert_same(actual, reference.dequantize_blockwise(*expected, codec, block_size, out), what)


if __name__ == "__main__":
    build.load(Path(sys.argv[1]))
    for layout, dtype in itertools.product(LAYOUTS, FLOATS):
        compare_codecs(layout, dtype, (24, 264))
    for name, (param, grad) in itertools.product(STEP_OPS, (FLOATS[:2], FLOATS[1:], (FLOATS[2], FLOATS[0]))):
        compare_steps(name, step_args(name, param, grad), scaler(), steps=1)
    compare_steps("adam_step_", step_args("adam_step_", block_size=1024), {}, steps=1)
    for layout, dtype in itertools.product(("odd", "0-dim", "empty", "unaligned", "a group"), FLOATS):
        compare_activations(torch.ops.memkern_simt, layout, dtype, 1)
        compare_activations(torch.ops.memkern_simt, layout, dtype, 4)
    norm = torch.zeros((), dtype=torch.float64)
    torch.ops.memkern_simt.grad_norm_(norm, [tensor(layout) for layout in LAYOUTS])
    print("nothing found")
