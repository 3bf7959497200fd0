"""torch.ops.memkern and torch.ops.memkern_reference: complete, alike, checked by opcheck, and strict."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FLOATS, INTERPRETED, assert_same, hard, needs_cpp, tensor
from torch import Tensor

import memkern
from memkern import _ops, reference
from memkern.codec import ACTIVATIONS
from memkern.layout import layout_of
from memkern.tables import LEVELS, VALLEYS

NAMESPACES = ("memkern", "memkern_reference", *(["memkern_triton"] if INTERPRETED else []))
over_namespaces = pytest.mark.parametrize("namespace", NAMESPACES)
over_ops = pytest.mark.parametrize("name", _ops.SCHEMAS)


def op(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default


# ---- every op has all its parts


@over_ops
def test_every_op_has_a_reference_a_fake_a_test_and_a_benchmark(name: str) -> None:
    root = Path(__file__).parents[1]
    public = name.removesuffix("_step_").removesuffix("_")  # adam, lion, quantize_blockwise, ...
    assert name in reference.__all__
    assert callable(getattr(reference, name))
    assert name in _ops.FAKES
    assert name in SAMPLES
    word = {"adam": "AdamW8bit", "lamb": "LAMB8bit", "lars": "LARS8bit", "lion": "Lion8bit"}.get(
        public, public
    )
    for folder, pattern in (("tests", "test_*.py"), ("benchmarks", "bench_*.py")):
        files = [*(root / folder).glob(pattern)]
        assert any(word in file.read_text() for file in files), f"{folder}/ does not mention {word}"


def test_nothing_is_left_unlisted() -> None:
    assert {*_ops.FAKES} == {*reference.__all__} == {*_ops.SCHEMAS}
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("memkern::")
    }
    assert registered == {*_ops.SCHEMAS}


@over_ops
def test_schemas_are_alike(name: str) -> None:
    ours, references = (str(op(namespace, name)._schema) for namespace in NAMESPACES[:2])
    assert ours.split("::")[1] == references.split("::")[1]
    stated = torch._C.parse_schema(f"memkern::{name}{_ops.SCHEMAS[name]}")
    assert str(stated) == ours


@needs_cpp
@over_ops
def test_cpu_tensors_meet_cpp(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern::{name}", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern_reference::{name}", "CPU")


# ---- opcheck


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
    "decoupled": 1,
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


def step_args(
    name: str, kinds: list[str], scaler: bool = False, codec: int = 0, **override: Any
) -> tuple[Any, ...]:
    """Arguments of a step for a tensor of each kind ("fp32" or "codes"), each in a group of its own."""
    shapes = ["odd", "long rows", "channels_last"]
    tensors = [states(tensor(shapes[i % 3], seed=i, scale=0.1), kind, i) for i, kind in enumerate(kinds)]
    n = len(kinds)
    moments = (
        {"exp_avgs": "m", "exp_avg_sqs": "v"} if name in ("adam_step_", "lamb_step_") else {"exp_avgs": "m"}
    )
    values: dict[str, Any] = {"params": [t["p"] for t in tensors], "grads": [t["g"] for t in tensors]}
    values |= {key: [t[k] for t in tensors] for key, k in moments.items()}
    values |= {
        f"{key[:-1]}_scales": [t[f"{k}_scale"] for t in tensors if t[f"{k}_scale"] is not None]
        for key, k in moments.items()
    }
    values |= {"steps": [t["step"] for t in tensors], "trust_ratios": [torch.ones(1) for _ in kinds]}
    values |= {"group": [*range(n)], "lr": [torch.tensor(1e-2, dtype=torch.float64) for _ in kinds]}
    values |= {key: [value] * n for key, value in HYPERPARAMETERS.items()}
    values |= {
        "codec": [codec] * n,
        "grad_scale": torch.tensor(4.0) if scaler else None,
        "found_inf": torch.tensor(0.0) if scaler else None,
        "grad_norm": torch.tensor(3.0, dtype=torch.float64) if scaler else None,
        "max_grad_norm": 1.5,
    }
    # Those that the schema names, in its order.
    args = {a.name: values[a.name] for a in op("memkern_reference", name)._schema.arguments}
    unknown = override.keys() - args.keys()
    assert not unknown, unknown
    return (*(args | override).values(),)


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
        for step in ("adam_step_", "lamb_step_", "lars_step_", "lion_step_")
    },
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
            *(list(v) if isinstance(v, tuple) else v for v in VALLEYS["silu"][1:]),
        )
        for layout in DENSE
        for dtype in FLOATS
    },
}
CASES = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]


@over_namespaces
@pytest.mark.parametrize(("name", "sample"), CASES)
def test_opcheck(namespace: str, name: str, sample: str) -> None:
    torch.library.opcheck(op(namespace, name), SAMPLES[name][sample]())


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_namespaces_give_the_same_bits(name: str, sample: str) -> None:
    results = []
    for namespace in NAMESPACES:
        args = SAMPLES[name][sample]()
        results.append([op(namespace, name)(*args), [a for a in args if isinstance(a, (list, Tensor))]])
    if name == "grad_norm_":  # each backend adds up in an order of its own
        torch.testing.assert_close(results[0][1][0], results[1][1][0], rtol=1e-12, atol=0)
    else:
        assert_same(*results)


@pytest.mark.parametrize(
    "name", [name for name in SAMPLES if name.startswith("few_bit") or "quantize" in name]
)
def test_meta_tensors(name: str) -> None:
    # What the fakes say about shapes, strides and dtypes, on tensors without data.
    for make in SAMPLES[name].values():
        args = make()
        real = op("memkern", name)(*args)
        fake = op("memkern", name)(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        for r, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, fake)), strict=True):
            assert (r.shape, r.dtype) == (f.shape, f.dtype)
            assert r.numel() < 2 or r.stride() == f.stride()


# ---- bad arguments


def p(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


ODD, LONG = (37, 53), (3, 1000)  # the shapes that step_args gives to the first two
BAD_STEPS: dict[str, dict[str, Any]] = {
    "a gradient fewer": {"grads": [p(*ODD)]},
    "a state fewer": {"exp_avgs": [p(*ODD).to(torch.int8)]},
    "a group number fewer": {"group": [0]},
    "a scale fewer": {"exp_avg_scales": [p(3, 8)]},
    "a scale too many": {"exp_avg_scales": [p(19), p(3, 8), p(1)]},
    "a group out of range": {"group": [0, 2]},
    "a negative group": {"group": [0, -1]},
    "a codec fewer": {"codec": [0]},
    "a block size fewer": {"block_size": [128]},
    "a beta fewer": {"beta1": [0.9]},
    "a decay too many": {"weight_decay": [0.1] * 3},
    "an unknown codec": {"codec": [0, 7]},
    "a bad block size": {"block_size": [128, 100]},
    "a block size too large": {"block_size": [128, 8192]},
    "scales of other blocks": {"block_size": [128, 256]},
    "fp64 parameter": {"params": [p(*ODD), p(*LONG, dtype=torch.float64)]},
    "integer gradient": {"grads": [p(*ODD), p(*LONG, dtype=torch.int32)]},
    "gradient of another shape": {"grads": [p(*ODD), p(1000, 3)]},
    "gradient of other strides": {"grads": [p(*ODD), p(1000, 3).t()]},
    "parameter that is not dense": {
        "params": [p(*ODD), p(3, 2000)[:, ::2]],
        "grads": [p(*ODD), p(3, 2000)[:, ::2]],
    },
    "state in bf16": {"exp_avgs": [p(*ODD).to(torch.int8), p(*LONG, dtype=torch.bfloat16)]},
    "unsigned codes of m": {"exp_avgs": [p(*ODD).to(torch.int8), p(*LONG, dtype=torch.uint8)]},
    "state of another shape": {"exp_avgs": [p(*ODD).to(torch.int8), p(1000, 3, dtype=torch.int8)]},
    "state of other strides": {"exp_avgs": [p(*ODD).to(torch.int8), p(1000, 3, dtype=torch.int8).t()]},
    "scale in fp16": {"exp_avg_scales": [p(19), p(3, 8, dtype=torch.float16)]},
    "scale of another shape": {"exp_avg_scales": [p(19), p(24)]},
    "lr of two numbers": {"lr": [torch.ones(()), torch.ones(2)]},
    "grad_scale of two numbers": {"grad_scale": torch.ones(2)},
    "found_inf of two numbers": {"found_inf": torch.zeros(2)},
    "grad_norm of two numbers": {"grad_norm": torch.zeros(2)},
}
# Of ops that have such an argument.
BAD_STEPS |= {
    "a step fewer": {"steps": [torch.tensor(0.0)]},
    "an eps fewer": {"eps": [1e-8]},
    "m in codes and v in fp32": {"exp_avg_sqs": [p(*ODD).to(torch.uint8), p(*LONG)]},
    "signed codes of v": {"exp_avg_sqs": [p(*ODD).to(torch.uint8), p(*LONG, dtype=torch.int8)]},
    "steps of two numbers": {"steps": [torch.tensor(0.0), torch.zeros(2)]},
    "steps as int64": {"steps": [torch.tensor(0.0), torch.tensor(0)]},
    "a momentum fewer": {"momentum": [0.9]},
    "a trust ratio fewer": {"trust_ratios": [torch.ones(1)]},
    "trust ratios of two layers": {"trust_ratios": [torch.ones(1), torch.ones(2)]},
    "trust ratio as a number": {"trust_ratios": [torch.ones(1), torch.ones(())]},
    "trust ratio in fp64": {"trust_ratios": [torch.ones(1), torch.ones(1, dtype=torch.float64)]},
    "a number of layers fewer": {"layers": [1]},
    "layers that do not divide": {"layers": [2, 1]},
    "layers that end inside a block": {"layers": [37, 1], "trust_ratios": [torch.ones(37), torch.ones(1)]},
    "layers below 0": {"layers": [-1, 1]},
}
BAD_CASES = [
    (name, case)
    for name in SAMPLES
    if "step" in name
    for case, override in BAD_STEPS.items()
    if override.keys() <= {a.name for a in op("memkern_reference", name)._schema.arguments}
]


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
    "norm, gaps": ("grad_norm_", (p((), dtype=torch.float64), [X, X[:, ::2]])),
    "norm, int": ("grad_norm_", (p((), dtype=torch.float64), [X.int()])),
    "dequantize, fp64": ("dequantize_blockwise", (CODES, p(4, 2), 0, 128, torch.float64)),
}

PLANES = torch.zeros(3, 128, dtype=torch.uint8)  # of X
VALLEY = SAMPLES["few_bit_backward_from_output"]["odd, torch.float32"]()[3:]
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
    "forward, no such function": ("few_bit_forward", (X, 12, 0.0, 0.0, *TABLE)),
    "forward, gaps": ("few_bit_forward", (X[:, ::2], 0, 0.0, 0.0, *TABLE)),
    "backward, codes of less": ("few_bit_backward", (X, PLANES[:, :112].contiguous(), [0.5] * 8)),
    "backward, rows with gaps": ("few_bit_backward", (X, PLANES.repeat(1, 2)[:, ::2], [0.5] * 8)),
    "backward, five planes": ("few_bit_backward", (X, PLANES.repeat(2, 1)[:5], [0.5] * 32)),
    "backward, signed codes": ("few_bit_backward", (X, PLANES.to(torch.int8), [0.5] * 8)),
    "backward, a level fewer": ("few_bit_backward", (X, PLANES, [0.5] * 7)),
    "backward, gaps": ("few_bit_backward", (p(4, 512)[:, ::2], PLANES, [0.5] * 8)),
    "backward, int": ("few_bit_backward", (X.int(), PLANES, [0.5] * 8)),
    "output, two planes": ("few_bit_backward_from_output", (X, X, PLANES[:2], *VALLEY)),
    "output, another shape": ("few_bit_backward_from_output", (X, p(256, 4), PLANES[:1], *VALLEY)),
    "output, other strides": ("few_bit_backward_from_output", (X, p(256, 4).t(), PLANES[:1], *VALLEY)),
    "output, int": ("few_bit_backward_from_output", (X, X.int(), PLANES[:1], *VALLEY)),
    "output, a coefficient fewer": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], VALLEY[0], VALLEY[1][1:], *VALLEY[2:]),
    ),
    "output, no coefficients": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], VALLEY[0], [], [], *VALLEY[3:]),
    ),
}


@over_namespaces
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise(namespace: str, case: str) -> None:
    name, args = BAD_CALLS[case]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        op(namespace, name)(*args)


@over_namespaces
def test_no_gradient_flows_through_codes(namespace: str) -> None:
    x = torch.randn(4, 256, requires_grad=True)
    codes, _ = memkern.quantize_blockwise(x)
    assert not codes.requires_grad
    with torch.no_grad():
        assert_same(op(namespace, "quantize_blockwise")(x, 0, True, 128)[0], codes)
