"""Optimizers follow changes between two steps: of memory formats, dtypes, options and modes; bad gradients raise."""

from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim.state import load_moment
from tests.support.helpers import (
    assert_same,
    first_moment,
    give_gradients,
    hard,
    like,
    make_params,
    name_of,
    on,
    over_8bit,
    over_cpu,
    over_kinds,
    snapshot,
    train,
)

FP32_CLASSES = [optim.AdamW, optim.Adam, optim.Lion, optim.LAMB, optim.LARS, optim.SGD]
over_fp32 = pytest.mark.parametrize("build", FP32_CLASSES, ids=name_of)


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    return [load_moment(name, optimizer.state[p]) for p in params for name in optimizer.moments]


# ---- gradients


@over_kinds
@pytest.mark.parametrize("order", [1, -1])
def test_bad_gradients_on_one_device_raise_before_the_other_device_steps(build: type, order: int) -> None:
    on_cpu, on_meta = make_params()[0], torch.nn.Parameter(torch.empty(6, 4, device="meta"))
    optimizer = build([on_cpu, on_meta][::order])
    for grad in (
        torch.empty(6, 4, dtype=torch.int32, device="meta"),
        torch.empty(6, 4, dtype=torch.complex64, device="meta"),
    ):
        on_cpu.grad = torch.ones_like(on_cpu)
        on_meta.grad_dtype = None
        on_meta.grad = grad
        before, version = on_cpu.detach().clone(), on_cpu._version
        with pytest.raises((TypeError, RuntimeError), match="gradients"):
            optimizer.step()
        assert_same(on_cpu, before)
        assert on_cpu._version == version
        assert (first_moment(optimizer, on_cpu) == 0).all()
    on_meta.grad = torch.empty(6, 4, device="meta")
    optimizer.step()
    assert on_cpu._version > version


# ---- memory formats


def images(seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(hard((8, 16, 8, 8), seed, scale=0.1))


def to_channels_last(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.contiguous(memory_format=torch.channels_last)


@over_fp32
def test_channels_last_after_a_step_changes_nothing(build: type) -> None:
    changed, straight = build([images()]), build([images()])
    train(changed, 2), train(straight, 2)
    to_channels_last(changed)
    assert changed.param_groups[0]["params"][0].is_contiguous(memory_format=torch.channels_last)
    for step in (2, 3):
        for optimizer in (changed, straight):
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = hard(p.shape, step)
            optimizer.step()
    (p,), (q,) = (o.param_groups[0]["params"] for o in (changed, straight))
    assert first_moment(changed, p).stride() == p.stride() != q.stride()
    if build in (optim.LAMB, optim.LARS):  # norms are summed in another order
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(p, q)
        assert all(map(torch.equal, moments_of(changed), moments_of(straight)))


# ---- options of a group


def test_options_that_are_set_back_convert_nothing() -> None:
    optimizer = optim.AdamW8bit(make_params())
    train(optimizer)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["codec"] = "dynamic"
    optimizer.param_groups[0]["codec"] = "power"
    optimizer.state_dict()
    assert_same(snapshot(optimizer), before)


def test_groups_may_change_places() -> None:
    a, b = make_params([(64, 128), (64, 128)])
    optimizer = optim.AdamW8bit([{"params": [a]}, {"params": [b], "codec": "dynamic"}])
    train(optimizer)
    before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in (a, b)]
    optimizer.param_groups.reverse()
    optimizer.state_dict()
    assert_same([dict(optimizer.state[p]) for p in (a, b)], before)


@pytest.mark.parametrize(
    ("build", "change"),
    [
        *((optim.AdamW8bit, change) for change in ({"codec": "log"}, {"block_size": 12}, {"state_bits": 4})),
        (optim.LAMB8bit, {"trust_bounds": (2.0, 1.0)}),
        *((optim.Muon8bit, change) for change in ({"eps": 0.0}, {"ns_steps": 0}, {"split": (3, 3)})),
        (optim.Muon8bit, {"ns_coefficients": (1.0, 2.0)}),
    ],
)
def test_options_out_of_range_raise_at_every_step(build: type, change: dict[str, Any]) -> None:
    optimizer = build(make_params([(64, 128), (10, 10)]))
    train(optimizer)
    optimizer.param_groups[0].update(change)
    before = snapshot(optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match=next(iter(change))):
            optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_the_option_layers_may_change_between_steps() -> None:
    optimizer = optim.LAMB8bit([torch.nn.Parameter(hard((64, 128), 0, scale=0.1))])
    train(optimizer)
    optimizer.param_groups[0]["layers"] = 4
    train(optimizer, 1, first=3)
    assert [len(r) for r in optimizer.trust_ratios().values()] == [4]


def test_capturable_is_a_groups_own() -> None:
    a, b, c = make_params()
    optimizer = optim.AdamW8bit([{"params": [a, b]}, {"params": [c], "capturable": True, "lr": 1e-2}])
    assert [type(g["lr"]) for g in optimizer.param_groups] == [float, torch.Tensor]
    straight = optim.AdamW8bit([{"params": make_params()[:2]}, {"params": make_params()[2:], "lr": 1e-2}])
    assert_same(train(optimizer), train(straight))


# ---- modes


@over_kinds
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_steps_under_inference_mode_change_no_bit(build: type, max_grad_norm: float | None) -> None:
    optimizer, straight = (build(make_params(), max_grad_norm=max_grad_norm) for _ in range(2))
    for modes in ((True, False, True), (False, False, False)):
        current = optimizer if modes[0] else straight
        params = current.param_groups[0]["params"]
        for step, inference in enumerate(modes):
            give_gradients(params, step)
            with torch.inference_mode(inference):
                current.step()
    assert_same(snapshot(optimizer), snapshot(straight))
    assert not any(v.is_inference() for s in optimizer.state.values() for v in s.values())


# ---- float64


@over_8bit
def test_fp64_parameters_refuse_8_bit_states(build: type) -> None:
    (p,) = make_params([(10, 10)])
    with pytest.raises(ValueError, match="state_bits must be 32 for float64 parameters"):
        build([p.detach().double().requires_grad_()])
    optimizer = build([p])
    train(optimizer, 1)
    p.data = p.data.double()
    p.grad = torch.ones_like(p)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="state_bits must be 32 for float64 parameters"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


@over_fp32
def test_a_model_turns_to_fp64_and_back(build: type) -> None:
    optimizer = build(make_params())
    params = optimizer.param_groups[0]["params"]
    train(optimizer, 2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for p in params:
            p.grad = None
            p.data = p.data.to(dtype)
        train(optimizer, 2)
        floats = torch.float64 if dtype == torch.float64 else torch.float32
        assert {first_moment(optimizer, p).dtype for p in params} == {floats}
        assert all(p.isfinite().all() for p in params)


@over_fp32
def test_fp64_parameters_are_unscaled_clipped_and_skipped_by_a_grad_scaler(build: type) -> None:
    params = [torch.nn.Parameter(p.detach().double()) for p in make_params()]
    straight = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = build(params, max_grad_norm=0.5), build(straight, max_grad_norm=0.5)
    optimizer.grad_scale = torch.tensor(1024.0)
    for step in range(3):
        for p, q in zip(params, straight, strict=True):
            q.grad = like(q, step)
            p.grad = q.grad * 1024
        optimizer.found_inf = torch.tensor(float(step == 1))
        before = snapshot(optimizer)
        optimizer.step()
        if step == 1:
            assert_same(snapshot(optimizer), before)
        else:
            other.step()
    for p, q in zip(params, straight, strict=True):
        torch.testing.assert_close(p, q, atol=0, rtol=1e-12)


# ---- gaps between elements


def strided(p: torch.Tensor) -> torch.nn.Parameter:
    """The values of p with a gap of one element after each. The gaps hold -7, which no step may write over."""
    storage = torch.full((*p.shape, 2), -7.0, dtype=p.dtype)
    storage[..., 0] = p.detach()
    return torch.nn.Parameter(storage[..., 0])


@over_kinds
@over_cpu
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"master_weights": "bf16+16"})], ids=name_of
)
def test_parameters_with_gaps_step_as_dense_ones(
    backend: str, build: type, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    dense = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params([*[(64, 128)] * 2, (10, 10), (300,)])]
    gaps = [strided(p) for p in dense[1:]]  # the first parameter stays dense
    first = torch.nn.Parameter(dense[0].detach().clone())
    optimizer, straight = (build(ps, min_8bit_size=0, weight_decay=0.1, **options) for ps in ([first, *gaps], dense))
    with on(backend):
        for step in range(3):
            give_gradients(dense, step)
            for p, q in zip([first, *gaps], dense, strict=True):
                p.grad = q.grad.clone()
            optimizer.step()
            straight.step()
    for p, q in zip([first, *gaps], dense, strict=True):
        assert torch.equal(p, q)
        assert_same(dict(optimizer.state[p]), dict(straight.state[q]))
    for p in gaps:
        assert not p.is_contiguous()
        between = p.detach().as_strided(p.shape, p.stride(), 1)
        assert (between == -7).all()
    assert {b.numel() for b in optimizer._buffers.values()} == {64 * 128}  # the size of the largest parameter
    loaded = build([torch.nn.Parameter(first.detach().clone()), *map(strided, gaps)], **options)
    loaded.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(loaded)["states"], snapshot(optimizer)["states"])


def test_bad_gradients_of_a_parameter_with_gaps_raise_before_the_others_step() -> None:
    p, q = make_params([(10, 10), (10, 10)])
    optimizer = optim.AdamW([p, strided(q)])
    q = optimizer.param_groups[0]["params"][1]
    p.grad = torch.ones_like(p)
    q.grad = torch.ones_like(q).to_sparse()
    before = snapshot(optimizer)["params"]
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    assert_same(snapshot(optimizer)["params"], before)


# ---- amsgrad


@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.Adam8bit], ids=name_of)
def test_amsgrad_needs_32_bits(build: type) -> None:
    with pytest.raises(ValueError, match="amsgrad needs 32-bit states: state_bits must be 32, got 8"):
        build(make_params(), amsgrad=True)
    train(build(make_params(), amsgrad=True, state_bits=32), 1)


def test_amsgrads_state_is_made_and_dropped_with_the_option() -> None:
    optimizer = optim.AdamW(make_params(), lr=1e-2)
    (p, *_) = optimizer.param_groups[0]["params"]
    train(optimizer, 2)
    assert "max_exp_avg_sq" not in optimizer.state[p]
    optimizer.param_groups[0]["amsgrad"] = True
    train(optimizer, 1)
    assert_same(optimizer.state[p]["max_exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    for q in optimizer.param_groups[0]["params"]:
        q.grad = torch.zeros_like(q)
    optimizer.step()
    assert (optimizer.state[p]["max_exp_avg_sq"] >= optimizer.state[p]["exp_avg_sq"]).all()
    assert not torch.equal(optimizer.state[p]["max_exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    optimizer.param_groups[0]["amsgrad"] = False
    train(optimizer, 1)
    assert "max_exp_avg_sq" not in optimizer.state[p]


def test_an_optimizer_made_for_meta_parameters_steps_those_with_values() -> None:
    """A model is built on the meta device, gets its optimizer, and only then memory and values."""
    with torch.device("meta"):
        model = torch.nn.Linear(64, 128)
    optimizer = optim.AdamW8bit(model.parameters(), capturable=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), make_params([(128, 64), (128,)]), strict=True):
            p.copy_(q)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    straight = optim.AdamW8bit(make_params([(128, 64), (128,)]))
    assert_same(train(optimizer), train(straight))
    assert optimizer.param_groups[0]["lr"].device.type == "cpu"
    assert optimizer.state[optimizer.param_groups[0]["params"][0]].plan.is_one_call
