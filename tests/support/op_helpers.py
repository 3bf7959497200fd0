"""What the ops' tests share: the namespaces, and arguments for every op."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import ACTIVATIONS
from memkern.quant.layout import layout_of
from memkern.schemas import STEP_OPS, StepArgs
from tests.support.helpers import FLOATS, INTERPRETED, hard, tensor
from tests.support.step_lists import names_of, pack

NAMESPACES = ("memkern", "memkern_reference", *(["memkern_triton"] if INTERPRETED else []))
over_namespaces = pytest.mark.parametrize("namespace", NAMESPACES)


def op(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default


def states(p: Tensor, kind: str, seed: int = 0) -> dict[str, Any]:
    """A parameter, its gradient and states as an optimizer would hold them."""
    layout = layout_of(p, 128)
    g = torch.empty_like(p).copy_(hard(p.shape, seed + 1))
    if kind == "fp32":
        m, v = torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32)
        return {"p": p, "g": g, "m": m, "v": v, "m_scale": None, "v_scale": None, "step": torch.tensor(0.0)}
    m, v = torch.zeros_like(p, dtype=torch.int8), torch.zeros_like(p, dtype=torch.uint8)
    scales = [torch.zeros(layout.scale_shape) for _ in range(2)]
    return {
        "p": p,
        "g": g,
        "m": m,
        "v": v,
        "m_scale": scales[0],
        "v_scale": scales[1],
        "step": torch.tensor(0.0),
    }


HYPERPARAMETERS = {
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": 1,
    "decoupled_decay": 1,
    "maximize": 0,
    "block_size": 128,
    "bias_correction": 1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": 0,
    "trust_coeff": 0.0,
    "trust_clip": 0,
    "always_adapt": 0,
    "layers": 1,
}


def step_args(name: str, kinds: list[str], scaler: bool = False, codec: int = 0, **override: Any) -> StepArgs:
    """Arguments of a step for a tensor of each kind ("fp32" or "codes"), each in a group of its own.

    ``override``: other lists, by the names that step_lists.pack has for them.
    """
    shapes = ["odd", "long rows", "channels_last"]
    tensors = [states(tensor(shapes[i % 3], seed=i, scale=0.1), kind, i) for i, kind in enumerate(kinds)]
    n = len(kinds)
    values: dict[str, Any] = {key: [value] * n for key, value in HYPERPARAMETERS.items()}
    for key, k in (
        ("params", "p"),
        ("grads", "g"),
        ("exp_avgs", "m"),
        ("exp_avg_sqs", "v"),
        ("steps", "step"),
    ):
        values[key] = [t[k] for t in tensors]
    for key, k in (("exp_avg_scales", "m_scale"), ("exp_avg_sq_scales", "v_scale")):
        values[key] = [t[k] for t in tensors if t[k] is not None]
    values |= {
        "trust_ratios": [torch.ones(1) for _ in kinds],
        "group": [*range(n)],
        "lr": [torch.tensor(1e-2, dtype=torch.float64) for _ in kinds],
        "codec": [codec] * n,
        "grad_scale": torch.tensor(4.0) if scaler else None,
        "found_inf": torch.tensor(0.0) if scaler else None,
        "grad_norm": torch.tensor(3.0, dtype=torch.float64) if scaler else None,
        "max_grad_norm": 1.5,
    }
    assert override.keys() <= names_of(name), override.keys()
    return pack(name, values | override)


def quantized(layout: str, codec: int, signed: bool) -> tuple[Tensor, Tensor]:
    return op("memkern_reference", "quantize_blockwise")(tensor(layout), codec, signed, 128)


STEPS = {
    "8-bit": {"kinds": ["codes"]},
    "32-bit": {"kinds": ["fp32"]},
    "mixed": {"kinds": ["codes", "fp32", "codes"]},
    "mixed, scaler": {"kinds": ["codes", "fp32", "codes"], "scaler": True},
    "dynamic": {"kinds": ["codes", "codes"], "codec": 1},
    "nothing": {"kinds": []},
}
SAMPLES: dict[str, dict[str, Any]] = {
    "quantize_blockwise": {
        f"{layout}, codec {codec}, {dtype}, step {step}": lambda a=(layout, dtype, codec, signed, step): (
            tensor(a[0], a[1]),
            a[2],
            a[3],
            128,
            a[4],
        )
        for layout in ("odd", "channels_last", "0-dim", "empty", "unaligned", "short rows")
        for dtype, codec, signed, step in (
            (torch.float32, 0, True, None),
            (torch.bfloat16, 0, False, 3),
            (torch.float16, 1, True, None),
        )
    },
    "dequantize_blockwise": {
        f"{layout}, codec {codec}, {dtype}": lambda a=(layout, codec, signed, dtype): (
            *quantized(*a[:3]),
            a[1],
            128,
            a[3],
        )
        for layout in ("odd", "channels_last", "0-dim", "empty", "short rows")
        for codec, signed, dtype in ((0, True, torch.float32), (1, False, torch.bfloat16))
    },
    **{
        step: {name: lambda s=step, o=options: step_args(s, **o) for name, options in STEPS.items()}
        for step in STEP_OPS
    },
}
for step in (name for name, op_ in STEP_OPS.items() if op_.has_trust_ratios):
    SAMPLES[step]["squares of others"] = lambda s=step: step_args(
        s, ["codes", "fp32"], squares=torch.tensor([[9.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    )


def muon_args(kinds: list[str], scaler: bool = False) -> list[Any]:
    """Matrices, and a batch of them; the updates that the momentum writes and the parameters take."""
    shapes = [(37, 53), (3, 1000), (4, 24, 40)]
    own = [states(hard(shapes[i % 3], i), kind, i) for i, kind in enumerate(kinds)]
    scales = [t["m_scale"] for t in own if t["m_scale"] is not None]
    args = StepArgs(
        params=[t["p"] for t in own],
        grads=[t["g"] for t in own],
        moments=[t["m"] for t in own],
        scales=scales,
        steps=[t["step"] for t in own],
        group=[*range(len(own))],
        lr=[torch.tensor(1e-2, dtype=torch.float64) for _ in own],
        hyperparameters=[0.95, 1.0, 0.1, 0.0] * len(own),
        codec=[0] * len(own),
        block_size=[128] * len(own),
        grad_scale=torch.tensor(4.0) if scaler else None,
        found_inf=torch.tensor(0.0) if scaler else None,
    )
    return [[hard(t["p"].shape, 9).bfloat16() for t in own], args]


SAMPLES["muon_momentum_"] = {
    name: lambda o=options: (
        (made := muon_args(**o))[0],
        [torch.zeros(u.shape[:-2], dtype=torch.float64) for u in made[0]],
        *made[1],
    )
    for name, options in STEPS.items()
    if "codec" not in options
}
SAMPLES["muon_apply_"] = {
    name: lambda o=options: ((made := muon_args(**o))[0], [0.2 + i for i in range(len(made[0]))], *made[1])
    for name, options in STEPS.items()
    if "codec" not in options
}
SAMPLES["grad_norm_"] = {
    name: lambda s=scale, d=dtypes: (
        torch.zeros((), dtype=torch.float64),
        [tensor(layout, dtype) for layout in ("odd", "channels_last", "empty", "unaligned") for dtype in d],
        s,
    )
    for name, scale, dtypes in (
        ("one dtype", None, [torch.float32]),
        ("all dtypes, scaler", torch.tensor(4.0), [torch.float32, torch.bfloat16, torch.float16]),
        ("nothing", None, []),
    )
}
GELU = LEVELS["gelu", 3]
TABLE = (3, [*GELU.thresholds], [*GELU.flips], GELU.symmetry)
DENSE = ("odd", "channels_last", "0-dim", "empty", "unaligned")


def planes(bits: int, layout: str) -> Tensor:
    """The codes of hard values in one of the layouts."""
    table = LEVELS["mish", bits]
    return op("memkern_reference", "few_bit_encode")(tensor(layout, scale=1.0), bits, *table[2:])


SAMPLES |= {
    "few_bit_encode": {
        f"{layout}, {dtype}": lambda a=(layout, dtype): (tensor(*a, scale=1.0), *TABLE)
        for layout in DENSE
        for dtype in FLOATS
    },
    "few_bit_forward": {
        f"{layout}, {name}": lambda a=(layout, name): (
            tensor(a[0], scale=1.0),
            ACTIVATIONS[a[1]],
            *((0.0, 6.0) if a[1] == "hardtanh" else (1.0, 20.0)),
            *TABLE,
        )
        for layout, name in [
            *((layout, "gelu_tanh") for layout in DENSE),
            *(("odd", name) for name in ACTIVATIONS),
        ]
    },
    "few_bit_backward": {
        f"{layout}, {dtype}, {bits} bits": lambda a=(layout, dtype, bits): (
            tensor(a[0], a[1], seed=1),
            planes(a[2], a[0]),
            [*LEVELS["mish", a[2]].levels],
        )
        for layout in DENSE
        for dtype, bits in zip(FLOATS, (1, 3, 4), strict=True)
    },
    "few_bit_backward_from_output": {
        f"{layout}, {dtype}": lambda a=(layout, dtype): (
            tensor(*a, seed=1),
            tensor(*a),
            planes(1, a[0]),
            *(list(v) if isinstance(v, tuple) else v for v in TWO_BRANCHES["silu"][1:]),
        )
        for layout in DENSE
        for dtype in FLOATS
    },
}


CASES = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]
