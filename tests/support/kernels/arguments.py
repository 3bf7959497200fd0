"""Arguments of the ops that step: hard values in every layout and dtype, states of every kind, two groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from memkern import reference
from memkern.quant.layout import layer_count
from memkern.schemas import MUON_STEP, STEP_OPS, WEIGHT_STATES, StepArgs
from tests.support.helpers import FLOATS, LAYOUTS, hard, like

MUON = ("muon_momentum_", "muon_apply_")
OPS = STEP_OPS | dict.fromkeys(MUON, MUON_STEP)
LAYERWISE = tuple(name for name, op in STEP_OPS.items() if op.has_trust_ratios)
MOMENTS = ("exp_avg", "exp_avg_sq")  # the tests' names of a first and a second moment, whatever an op calls them
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

Layout = str | tuple[int, ...] | Callable[[Callable[..., Tensor]], Tensor]
SMALL: tuple[Layout, ...] = (
    *("whole blocks", "odd", "short rows", "channels_last", "long rows", "unaligned", "0-dim", "empty"),
)
MATRICES: tuple[Layout, ...] = (
    *((37, 53), (3, 1000), (130, 8), (1, 130), (4, 24, 40), (2, 3, 16, 24), (5, 0), (0, 5, 3)),
    lambda new: new(40, 24).t(),
    lambda new: new(24, 40, 3).permute(2, 0, 1),
)

# Six groups, of which a case has two: all pairs of flags, no memory and a long one, large decays; lr in fp32 and fp64.
LR = (1e-2, 3e-3, 0.0, 3.0, 1e-2, 3.0)
BETA1, BETA2 = (0.9, 0.8, 0.0, 0.99, 0.9, 0.5), (0.999, 0.9, 0.0, 0.99999, 0.999, 0.99)
EPS = (1e-8, 1e-6, 1e-8, 1e-30, 1e-4, 1e-8)
FLAGS = ((1, 0, 0, 1, 1, 0), (0, 1, 0, 1, 0, 1), (0, 1, 1, 0, 1, 0), (0, 1, 1, 1, 0, 0), (0, 1, 0, 0, 1, 1))
HYPERPARAMETERS: dict[str, dict[str, Sequence[float]]] = {
    "adam_step_": {
        "beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": (0.1, 0.2, 0.0, 0.1, 30.0, 0.0),
        "decoupled_weight_decay": FLAGS[0], "maximize": FLAGS[1],
    },
    "lamb_step_": {
        "beta1": BETA1, "beta2": BETA2, "eps": (1e-8, 1e-6, 1e-8, 0.0, 1e-4, 1e-8),
        "weight_decay": (0.1, 0.0, 0.0, 0.1, 30.0, 0.0), "decoupled_decay": FLAGS[0], "bias_correction": FLAGS[1],
        "trust_clip": FLAGS[2], "always_adapt": FLAGS[3], "maximize": FLAGS[4],
    },
    "lars_step_": {
        "momentum": BETA1, "dampening": (0.0, 0.0, 0.0, 0.3, 0.5, 0.0), "weight_decay": (0.1, 0.0, 0.0, 0.1, 30.0, 0.0),
        "nesterov": FLAGS[1], "trust_coeff": (0.0, 1e-2, 0.0, 1e-3, 1e-2, 1e-2), "eps": (0.0, 1e-8, 0.0, 0.0, 1e-8, 0),
        "trust_clip": (0, 1, 1, 0, 0, 1), "always_adapt": FLAGS[3], "maximize": FLAGS[4],
    },
    "lion_step_": {
        "beta1": BETA1, "beta2": BETA2, "weight_decay": (0.1, 0.2, 0.0, 0.1, 30.0, 0.0), "maximize": FLAGS[1],
    },
    "sgd_step_": {
        "momentum": BETA1, "dampening": (0.5, 0.0, 0.0, 0.3, 1.0, 0.0),
        "weight_decay": (0.0, 0.1, 0.0, 0.1, 30.0, 0.2), "nesterov": FLAGS[1], "maximize": FLAGS[4],
    },
    "muon_momentum_": {
        "momentum": (0.95, 0.3, 0.0, 0.99, 0.9, 0.5), "nesterov": FLAGS[0],
        "weight_decay": (0.1, 0.0, 0.1, 0.0, 30.0, 0.0), "maximize": FLAGS[1],
    },
}  # fmt: skip
HYPERPARAMETERS["muon_apply_"] = HYPERPARAMETERS["muon_momentum_"]


MIXED: dict[str, Any] = {"param": FLOATS, "grad": [F32, BF16, F16, BF16, F16, F32, F16, F32, BF16]}
"""All pairs of dtypes in one call."""


def names_of(name: str) -> set[str]:
    """The lists that :func:`step_args` takes for an op."""
    op = OPS[name]
    states = {f"{moment}{suffix}" for moment in MOMENTS[: len(op.moments)] for suffix in ("s", "_scales")}
    left_out = {"moments", "scales", "hyperparameters", *([] if op.has_trust_ratios else ["trust_ratios"])}
    return states | ({*StepArgs._fields} - left_out) | {*op.hyperparameters}


def pack(name: str, lists: dict[str, Any]) -> StepArgs:
    """StepArgs of ``lists``: exp_avgs, exp_avg_scales, ...; hyperparameters, each a value per group; other fields."""
    op = OPS[name]
    moments = MOMENTS[: len(op.moments)]
    by_group = zip_longest(*(lists[option] for option in op.hyperparameters))
    packed = {
        "moments": [x for moment in moments for x in lists[f"{moment}s"]],
        "scales": [x for moment in moments for x in lists[f"{moment}_scales"]],
        "trust_ratios": lists["trust_ratios"] if op.has_trust_ratios else [],
        "hyperparameters": [float(x) for group in by_group for x in group if x is not None],
    }
    return StepArgs(**{field: lists[field] for field in StepArgs._fields if field in lists} | packed)


def hard_tensor(layout: Layout, seed: int, dtype: torch.dtype, **options: Any) -> Tensor:
    """Hard values in a layout, which may be a shape."""

    def new(*shape: int) -> Tensor:
        return hard(shape, seed, **options).to(dtype)

    if isinstance(layout, tuple):
        return new(*layout)
    return (LAYOUTS[layout] if isinstance(layout, str) else layout)(new)


def with_nonfinite(x: Tensor) -> Tensor:
    """x, in which NaN and infinities are written to three places."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    for place, value in ((3, torch.nan), (500, torch.inf), (700, -torch.inf)):
        flat[place : place + 1] = value
    return x


Gradient = Callable[[Tensor, int, torch.dtype], Tensor]


def hard_gradient(p: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Hard values; for two seeds in five some are not finite."""
    g = like(p, seed, dtype)
    return with_nonfinite(g) if seed % 5 in (1, 4) else g


def gradients(
    params: Sequence[Tensor], step: int, dtypes: Sequence[torch.dtype], gradient: Gradient = hard_gradient
) -> list[Tensor]:
    """Gradients of the parameters at a step, with ``dtypes`` in turn."""
    return [gradient(p, 100 * step + i, dtypes[i % len(dtypes)]) for i, p in enumerate(params)]


def step_args(
    name: str,
    layouts: Sequence[Layout] = tuple(LAYOUTS),
    param: Sequence[torch.dtype] = (F32,),
    grad: Sequence[torch.dtype] = (F32,),
    codec: Sequence[int] = (0, 1),
    block_size: int | Sequence[int] = 128,
    weights: Sequence[int] = (0, 0),
    kinds: str = "mixed",
    fresh: bool = False,
    groups: Sequence[int] = (0, 1),
    gradient: Gradient = hard_gradient,
    wrong: Mapping[str, Any] = {},
    **override: Any,
) -> StepArgs:
    """A tensor of each layout, in two groups in turn. The first, the fifth, ..., with ``fresh`` all, are at step 0.

    ``param`` and ``grad``: dtypes, which the tensors get in turn.
    ``kinds``: whether states are codes: of two in three ("mixed"), of all ("codes"), of none ("fp32"). ``codec``,
    ``block_size`` and ``weights`` (weight_storage): the groups'. ``groups``: their columns of HYPERPARAMETERS.
    ``override``: other lists, by the names of :func:`names_of`; ``wrong``: some that do not fit.
    """
    op = OPS[name]
    blocks = [block_size] * 2 if isinstance(block_size, int) else [*block_size]
    params = [hard_tensor(layout, i, param[i % len(param)], scale=0.1) for i, layout in enumerate(layouts)]
    group = override.get("group", [i % 2 for i in range(len(params))])
    layers = override.setdefault("layers", [1, 1])
    params_in_groups = [*zip(params, group, strict=True)]
    lists: dict[str, Any] = {key: [] for moment in MOMENTS for key in (f"{moment}s", f"{moment}_scales")}
    lists |= {key: [values[k] for k in groups] for key, values in HYPERPARAMETERS[name].items()}
    for i, (p, k) in enumerate(params_in_groups):
        for moment, signed in zip(MOMENTS, op.moments.values(), strict=False):
            x = like(p, 200 + i, F32, signed=signed) * bool(i % 4 and not fresh)
            if kinds == "codes" or (kinds == "mixed" and i % 3 != 2):
                x, scale = reference.quantize_blockwise(x, codec[k], signed, blocks[k])
                lists[f"{moment}_scales"].append(scale)
            lists[f"{moment}s"].append(x)
    return pack(
        name,
        lists
        | {
            "params": params,
            "grads": gradients(params, 1, grad, gradient),
            "steps": [torch.tensor(0.0 if fresh else float(i % 4)) for i in range(len(params))],
            "trust_ratios": [torch.ones(layer_count(p, blocks[k], layers[k])) for p, k in params_in_groups],
            "weight_states": [weight_state(p, weights[k]) for p, k in params_in_groups if weights[k] in WEIGHT_STATES],
            "group": group,
            "lr": [torch.tensor(LR[k], dtype=dtype) for k, dtype in zip(groups, (torch.float64, F32), strict=True)],
            "codec": [*codec],
            "block_size": blocks,
            "weight_storage": [*weights],
        }
        | override
        | wrong,
    )


def weight_state(p: Tensor, storage: int) -> Tensor:
    """Any errors of bf16 weights, also those that no step leaves there."""
    dtype = getattr(torch, WEIGHT_STATES[storage])
    limits = torch.iinfo(dtype)
    state = torch.randint(limits.min, limits.max + 1, p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return torch.empty_like(p, dtype=dtype).copy_(state)


def arguments(name: str, **options: Any) -> list[Any]:
    """All arguments of an op that takes those of :func:`step_args`."""
    args = step_args(name, **options)
    if OPS[name] is not MUON_STEP:
        return [*args]
    updates = [torch.empty_like(p, dtype=BF16).copy_(hard(p.shape, 9)) for p in args.params]
    if name == "muon_apply_":
        return [updates, [0.2 + i for i in range(len(updates))], *args]
    return [updates, [torch.full(u.shape[:-2], torch.nan, dtype=torch.float64) for u in updates], *args]


def with_gradients(args: Sequence[Any], grads: Sequence[Tensor]) -> list[Any]:
    """The arguments of :func:`arguments` with other gradients."""
    first = len(args) - len(StepArgs._fields)
    return [*args[:first], *StepArgs(*args[first:])._replace(grads=grads)]


def cloned(args: StepArgs) -> StepArgs:
    """Copies that lie in memory alike."""
    return StepArgs(*copy.deepcopy(args))


SCALER: dict[str, Any] = {
    "grad_scale": torch.tensor(8.0),
    "found_inf": torch.tensor(0.0),
    "grad_norm": torch.tensor(3.0, dtype=torch.float64),
    "max_grad_norm": 1.0,
}
"""A GradScaler's factor and a norm to clip to."""
