"""bf16 weights with kept rounding errors (master_weights) step as fp32 ones; with stochastic_rounding none is lost."""

import copy

import pytest
import torch

from memkern import memory, optim
from memkern.reference.blockwise import dither, weight_random
from memkern.reference.weights import join_weight, split_weight
from tests.support.bf16_weights import BF16, OPTIONS, bf16_params, fp32_weights, over_master_weights, over_options
from tests.support.helpers import (
    LAYOUTS,
    assert_same,
    hard,
    like,
    name_of,
    on,
    over_cpu,
    set_grad,
    snapshot,
    tensor,
    train,
)
from tests.support.trained import STATES, VARIANTS

# ---- the formula


def test_split_weights_join_to_the_same_bits() -> None:
    # Every upper half of fp32's bits with lower halves around the places where rounding turns.
    high = torch.arange(2**16).repeat_interleave(7)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234]).repeat(2**16)
    u = high * 2**16 + low
    x = torch.where(u >= 2**31, u - 2**32, u).int().view(torch.float32)
    p, error = split_weight(x, 0, 0)
    assert error.min() == -(2**15)
    assert error.max() == 2**15 - 1
    assert_same(p.to(BF16).float(), p)
    assert_same(join_weight(p.to(BF16), error.short(), 0), x)
    finite = x.isfinite() & p.isfinite()
    nearest = x.to(BF16).float()
    assert ((p - x).abs() == (nearest - x).abs())[finite].all()
    assert (error[~x.isfinite()] == 0).all()
    # Errors of 8 bits make weights of 24: off by less than 2^-8 of bf16's unit, whatever the random bits.
    for r in (0, 128, 255):
        p, error = split_weight(x, r, 8)
        joined = join_weight(p.to(BF16), error.to(torch.int8), 8)
        unit = 2.0 ** (torch.frexp(x).exponent.clamp(min=-125) - 16.0)
        assert ((joined - x).abs() <= unit)[finite & joined.isfinite()].all()


@pytest.mark.full
def test_rounding_is_without_bias() -> None:
    x = hard((16, 4096), 0, scale=1.0)
    steps = 512
    for dropped in (8, 16):
        total = torch.zeros_like(x, dtype=torch.float64)
        for step in range(1, steps + 1):
            r = weight_random(4096, step, dropped, x.device)
            p, error = split_weight(x, r, dropped)
            total += join_weight(p.to(BF16), error if dropped == 16 else error.to(torch.int8), dropped).double()
        unit = (2.0 ** (torch.frexp(x).exponent.clamp(min=-125) - 24.0 + dropped)).double()
        bias = (total / steps - x) / unit
        # Random numbers would give a standard deviation of up to 0.5 / sqrt(512) = 0.022.
        assert bias.abs().max() < 0.02
        assert bias.mean().abs() < 1e-3


def test_random_bits_are_independent_of_the_dither() -> None:
    block = 128
    pairs = [
        (
            dither(block, step, torch.device("cpu")).double(),
            weight_random(block, step, 16, torch.device("cpu")) / 2**16,
        )
        for step in range(1, 401)
    ]
    u, r = (torch.stack(x) for x in zip(*pairs, strict=True))
    # Each of 8 x 8 fields of the unit square has its share of all 51,200 pairs, within a tenth.
    counts = torch.bincount((u * 8).long().flatten() * 8 + (r * 8).long().flatten(), minlength=64)
    assert (counts - counts.double().mean()).abs().max() < 0.1 * counts.double().mean()
    along_steps = torch.stack([torch.corrcoef(torch.stack([u[:, j], r[:, j]]))[0, 1] for j in range(block)])
    assert along_steps.abs().max() < 0.05


# ---- steps


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("states", STATES)
def test_weights_with_16_bit_errors_have_the_bits_of_fp32_ones(variant: str, states: str) -> None:
    """The weights, joined, have the bits of fp32 parameters with the same gradients."""
    spec, options = VARIANTS[variant]
    build = spec.cls
    runs = {}
    for master_weights in (None, "bf16+16"):  # None: fp32 parameters
        params = [tensor(layout, BF16, seed=i, scale=0.1) for i, layout in enumerate(LAYOUTS)]
        if master_weights is None:
            params = [p.float() for p in params]
        params = [torch.nn.Parameter(p) for p in params]
        optimizer = build(params, min_8bit_size=0, **options, **STATES[states], master_weights=master_weights)
        for step in range(3):
            for i, p in enumerate(params):
                set_grad(p, like(p, 100 * step + i, BF16))
            optimizer.step()
        runs[master_weights] = [*zip(fp32_weights(optimizer), snapshot(optimizer)["params"], strict=True)]
    for (x, _), (joined, q) in zip(*runs.values(), strict=True):
        assert_same(joined, x)
        off = (x.to(BF16).float() - q.float()).abs()
        assert (off == 0).float().mean() > 0.99 or x.numel() < 200  # rounded ties alone differ


@over_cpu
@over_options
def test_a_shard_of_rows_has_the_bits_of_the_whole(backend: str, option: str) -> None:
    x = hard((48, 300), 0, scale=0.1).to(BF16)
    unsharded = torch.nn.Parameter(x.clone())
    shards = [torch.nn.Parameter(x[i : i + 16].clone()) for i in (0, 16, 32)]
    optimizers = [optim.AdamW8bit([p], min_8bit_size=0, **OPTIONS[option]) for p in (unsharded, *shards)]
    with on(backend):
        for step in range(4):
            unsharded.grad = like(unsharded, step)
            for i, p in enumerate(shards):
                p.grad = unsharded.grad[16 * i : 16 * i + 16].clone()
            for optimizer in optimizers:
                optimizer.step()
    assert_same(torch.cat([p.detach() for p in shards]), unsharded.detach())


# ---- options


def test_bad_options_raise() -> None:
    for options, message in (
        (
            {"master_weights": "fp32"},
            "master_weights must be one of None, 'bf16\\+16', 'bf16\\+8', got 'fp32'",
        ),
        ({"stochastic_rounding": 1}, "stochastic_rounding must be True or False, got 1"),
        ({"stochastic_rounding": True, "master_weights": "bf16+8"}, "leave one of them out"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.AdamW8bit(bf16_params(), **options)


@over_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=name_of)
def test_other_dtypes_than_bf16_are_refused(option: str, dtype: torch.dtype) -> None:
    build = optim.AdamW8bit
    p = torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))
    with pytest.raises(TypeError, match=f"is for bfloat16 parameters, got {dtype}"):
        build([p], state_bits=32, **OPTIONS[option])
    optimizer = build(bf16_params(), **OPTIONS[option])
    with pytest.raises(TypeError, match="put other parameters into a group without it"):
        optimizer.add_param_group({"params": [p], "state_bits": 32})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [p], "state_bits": 32, "master_weights": None, "stochastic_rounding": False})
    train(optimizer, 2)


@over_master_weights
def test_the_option_may_change_between_steps(master_weights: str) -> None:
    params = bf16_params()
    optimizer = optim.AdamW8bit(params, lr=1e-2, master_weights=master_weights)
    train(optimizer, 2)
    weights = fp32_weights(optimizer)
    moments = copy.deepcopy([s["exp_avg"] for s in optimizer.state.values()])
    for value in ("bf16+16", "bf16+8"):
        optimizer.param_groups[0]["master_weights"] = value
        optimizer.state_dict()  # converts
        rtol = 2**-15 if "bf16+8" in (value, master_weights) else 0
        for x, y in zip(fp32_weights(optimizer), weights, strict=True):
            assert ((x - y).abs() <= rtol * y.abs() + 1e-38).all()
        assert_same([s["exp_avg"] for s in optimizer.state.values()], moments)
        optimizer.param_groups[0]["master_weights"] = master_weights
        optimizer.state_dict()
        weights = fp32_weights(optimizer)
    optimizer.param_groups[0]["master_weights"] = None
    train(optimizer, 1)
    assert "weight_error" not in optimizer.state[params[0]]


def test_state_bytes_count_the_kept_errors() -> None:
    p = torch.nn.Parameter(torch.zeros(256, 1024, dtype=BF16))
    for master_weights, error_bytes in ((None, 0), ("bf16+16", 2), ("bf16+8", 1)):
        optimizer = optim.AdamW8bit([p], master_weights=master_weights)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        weight_bytes = {key: size for key, size in memory.state_bytes(optimizer).items() if "weight" in key}
        assert weight_bytes == ({} if master_weights is None else {"weight_error": error_bytes * p.numel()})
        assert sum(memory.state_bytes(optimizer).values()) == memory.optimizer_bytes(optimizer)
        assert memory.optimizer_bytes(optimizer) == p.numel() * (2 + 8 / 128 + error_bytes) + 4
