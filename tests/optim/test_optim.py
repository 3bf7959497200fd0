"""Which states are 8-bit and how large they are, groups, defaults, and parameters that share memory."""

import math
from typing import Any

import pytest
import torch

from memkern import memory, optim
from tests.support.helpers import (
    assert_same,
    first_moment,
    give_gradients,
    make_params,
    name_of,
    over_8bit,
    over_kinds,
    snapshot,
    train,
)

# ---- which states are 8-bit


def test_small_and_flat_tensors_keep_fp32_states() -> None:
    is_8bit_of = {  # shape: whether its states are 8-bit
        (64, 64): True,
        (63, 65): False,  # 4,095 elements
        (4096, 1): True,
        (4096,): False,
        (65535,): False,
        (65536,): True,
        (1, 4096): True,
        (): False,
        (0, 4096): False,
    }
    params = make_params(is_8bit_of)
    optimizer = optim.AdamW8bit(params)
    train(optimizer, 1)
    for p, is_8bit in zip(params, is_8bit_of.values(), strict=True):
        state = optimizer.state[p]
        expected = (torch.int8, torch.uint8) if is_8bit else (torch.float32, torch.float32)
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == expected, tuple(p.shape)
        scales = ["exp_avg_scale", "exp_avg_sq_scale"] if is_8bit else []
        assert [*state] == ["exp_avg", "exp_avg_sq", *scales, "step"]


@over_8bit
def test_min_8bit_size_moves_the_border(build: type) -> None:
    params = make_params()
    optimizer = build(params, min_8bit_size=100)
    train(optimizer, 1)
    assert [first_moment(optimizer, p).dtype for p in params] == [torch.int8, torch.int8, torch.float32]


# Blocks of 128 are full or nearly so: rows have a multiple of 128 elements or more than 1,024, and a vector is one row.
@pytest.mark.parametrize(
    "shape", [(32, 128), (4, 1025), (7, 5001), (100, 1280), (65536,), (2048, 768), (8, 16, 3, 384)]
)
def test_8_bit_states_take_their_codes_and_few_scales(shape: tuple[int, ...]) -> None:
    (p,) = params = make_params([shape])
    optimizer = optim.AdamW8bit(params)
    train(optimizer, 1)
    # The worst rows have 1,025 elements: 2 codes each, 2 fp32 scales for each of 9 blocks; and the step's 4 bytes for
    # 4,100 elements. Lion has one moment.
    assert 2 < memory.optimizer_bytes(optimizer) / p.numel() <= 2 + 2 * 9 * 4 / 1025 + 4 / 4100
    lion = optim.Lion8bit(params)
    train(lion, 1)
    assert 1 < memory.optimizer_bytes(lion) / p.numel() <= 1 + 9 * 4 / 1025 + 4 / 4100
    sgd = optim.SGD8bit(params)
    train(sgd, 1)
    assert memory.optimizer_bytes(sgd) == memory.optimizer_bytes(lion)
    assert [*sgd.state[p]] == ["momentum_buffer", "momentum_buffer_scale", "step"]


# ---- groups


@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.LAMB8bit], ids=name_of)
def test_groups_have_their_own_options(build: Any) -> None:
    bounds: list[Any] = [(30.0, 80.0), (0.0, 1.0), (500.0, math.inf)]
    options: list[dict[str, Any]] = [
        {},
        {"lr": 3e-3, "weight_decay": 0.0},
        {"betas": (0.8, 0.9), "eps": 1e-5},
        {"state_bits": 32, "maximize": True},
        {"codec": "dynamic", "block_size": 64},
        {"min_8bit_size": 10**6},
        *([{"decoupled_weight_decay": False}] if build is optim.AdamW8bit else [{"trust_bounds": x} for x in bounds]),
    ]
    together = build([{"params": make_params([(48, 128)], i), **o} for i, o in enumerate(options)], lr=1e-2)
    separate = [build([{"params": make_params([(48, 128)], i), **o}], lr=1e-2) for i, o in enumerate(options)]
    for step in range(3):
        give_gradients([g["params"][0] for g in together.param_groups], step)
        for group, optimizer in zip(together.param_groups, separate, strict=True):
            optimizer.param_groups[0]["params"][0].grad = group["params"][0].grad
            optimizer.step()
        together.step()
    for i, optimizer in enumerate(separate):
        assert_same(snapshot(together)["params"][i], snapshot(optimizer)["params"][0], str(options[i]))
        assert_same(snapshot(together)["states"][i], snapshot(optimizer)["states"][0], str(options[i]))
    moved = snapshot(together)["params"]
    assert not any(torch.equal(moved[0], p) for p in moved[1:])


@over_kinds
def test_a_group_added_in_training_steps_as_alone(build: type) -> None:
    first, second = make_params(), make_params([(40, 128), (5,)], 50)
    optimizer = build(first, lr=1e-2)
    before = train(optimizer, 2)
    optimizer.add_param_group({"params": second, "lr": 1e-4})
    separate = build(make_params([(40, 128), (5,)], 50), lr=1e-4)
    for step in (2, 3):
        train(optimizer, 1, first=step)
        for p, q in zip(separate.param_groups[0]["params"], second, strict=True):
            p.grad = q.grad
        separate.step()
    assert_same(snapshot(optimizer)["params"][3:], snapshot(separate)["params"])
    assert not torch.equal(snapshot(optimizer)["params"][0], before["params"][0])
    if "step" in optimizer.state[first[0]]:
        assert [float(optimizer.state[p]["step"]) for p in (first[0], second[0])] == [4, 2]


def test_params_may_come_as_a_generator_named_or_one_alone() -> None:
    model = torch.nn.Linear(128, 64)
    assert len(optim.AdamW8bit(p for p in model.parameters()).param_groups[0]["params"]) == 2
    named = optim.AdamW8bit(model.named_parameters())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    named.add_param_group({"params": [("extra", torch.nn.Parameter(torch.ones(3)))]})
    assert named.state_dict()["param_groups"][1]["param_names"] == ["extra"]
    single = optim.AdamW8bit([{"params": model.weight}])
    assert single.param_groups[0]["params"] == [model.weight]


def test_defaults_are_those_of_torch() -> None:
    params = make_params()
    for cls, torch_class in ((optim.AdamW, torch.optim.AdamW), (optim.Adam, torch.optim.Adam)):
        ours, theirs = cls(params).defaults, torch_class(params).defaults
        for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
            assert ours[key] == theirs[key], key
        assert ours["state_bits"] == 32


def test_positional_arguments_are_those_of_torch() -> None:
    optimizer = optim.AdamW8bit(make_params(), 1e-2, (0.8, 0.9), 1e-6, 0.3)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-2, (0.8, 0.9), 1e-6, 0.3)
    assert group["state_bits"] == 8
    assert "codec: power" in repr(optimizer)


def test_lr_may_be_a_tensor_which_the_group_keeps() -> None:
    lr = torch.tensor(1e-2)
    assert optim.AdamW(make_params(), lr=lr).param_groups[0]["lr"] is lr


@over_kinds
def test_parameters_of_lazy_modules_train(build: type) -> None:
    """The optimizer is made before the first forward pass, as torch.optim allows."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.LayerNorm(64))
    optimizer = build(model.parameters(), min_8bit_size=0)
    for _ in range(2):
        model(torch.ones(2, 128)).square().sum().backward()
        optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())


# ---- parameters that share memory


@pytest.mark.pairwise
@pytest.mark.parametrize("when", [-2, -1, 1])  # they share memory before the optimizer is made, after, from step 1 on
@pytest.mark.parametrize("shared_rows", [128, 64])  # rows that both have; the first parameter has 128
@over_kinds
def test_parameters_over_one_memory_are_stepped_one_after_the_other(build: type, shared_rows: int, when: int) -> None:
    """As in torch.optim, the second parameter's step begins from the values that the first parameter's step wrote."""

    def run(together: bool) -> torch.Tensor:
        a, b = (torch.nn.Parameter(torch.linspace(-1, 1, n * 512).view(n, 512)) for n in (128, shared_rows))
        generator, optimizers = torch.Generator().manual_seed(0), []
        for i in range(-2, 4):
            if i == when:
                b.data = a.data[:shared_rows]
            if i == -2:
                optimizers = [build(params, lr=1e-2) for params in ([[a, b]] if together else [[a], [b]])]
            if i < 0:
                continue
            for p in (a, b):
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
        return a.detach().clone()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(run(True), run(False))
    finally:
        torch.set_num_threads(threads)


def test_parts_of_one_memory_are_stepped_together() -> None:
    params = [torch.nn.Parameter(half) for half in torch.zeros(64, 128).chunk(2)]
    optimizer = optim.AdamW8bit(params, min_8bit_size=0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[params[0]].plan.is_one_call
