"""What PyTorch asks of its own optimizers (torch/testing/_internal/common_optimizers.py, test/test_optim.py), of ours.

An optimizer is described once, by its class and options (tests/support/generic_optimizers.py); a test runs over all of
them. State dicts, hooks and copies are in test_generic_state.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.profiler import ProfilerActivity, profile

from memkern import optim
from tests.support.generic_optimizers import (
    ADAM,
    CASES,
    COMMON,
    Options,
    assert_right_direction,
    clones,
    closure_of,
    linear,
)
from tests.support.helpers import assert_same, name_of, over_optimizers, snapshot

# ---- steps

SCHEDULERS: dict[str, list[Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "no schedule": [],
    "StepLR and ReduceLROnPlateau": [
        lambda o: StepLR(o, gamma=0.9, step_size=10),
        lambda o: ReduceLROnPlateau(o),
    ],
    "OneCycleLR": [lambda o: OneCycleLR(o, max_lr=1e-2, total_steps=21)],
}


def test_goes_in_the_right_direction(new: Any) -> None:
    weight, bias, x = linear()
    optimizer = new([weight, bias])
    closure = closure_of(optimizer, weight, bias, x)
    assert_right_direction(optimizer, closure, up=optimizer.param_groups[0]["maximize"])


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_goes_in_the_right_direction_on_a_schedule(plain: Any, schedule: str, strided: bool) -> None:
    weight, bias, x = linear(strided=strided)
    optimizer = plain([weight, bias])
    schedulers = [make(optimizer) for make in SCHEDULERS[schedule]]
    assert_right_direction(optimizer, closure_of(optimizer, weight, bias, x), schedulers)


@over_optimizers
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_a_group_with_a_rate_of_its_own_and_a_schedule(build: type, schedule: str) -> None:
    weight, bias, x = linear()
    optimizer = build([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
    schedulers = [make(optimizer) for make in SCHEDULERS[schedule]]
    assert_right_direction(optimizer, closure_of(optimizer, weight, bias, x), schedulers)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_is_its_number(plain: Any, shape: tuple[int, ...]) -> None:
    weight, bias, x = linear()
    ours = clones(weight, bias)
    lr = torch.tensor(1e-3, dtype=torch.float64).expand(shape).clone()
    reference, optimizer = plain([weight, bias], lr=1e-3), plain(ours, lr=lr)
    for _ in range(5):
        reference.step(closure_of(reference, weight, bias, x))
        optimizer.step(closure_of(optimizer, *ours, x))
    assert_same(snapshot(optimizer), snapshot(reference))
    assert lr == 1e-3


def test_groups_differ_in_their_options(new: Any) -> None:
    weight, bias, x = linear()
    irrelevant = Parameter(torch.randn(2))
    before = irrelevant.detach().clone()
    options = copy.deepcopy(new.options)
    lr = options.pop("lr", 1e-3)
    for key in ("max_grad_norm", "foreach", "fused"):  # the whole optimizer's
        options.pop(key, None)
    optimizer = new.build(
        [
            {"params": [weight], "lr": lr, **options},
            {"params": [bias], "lr": lr, **options, "weight_decay": 0.0},
            {"params": [irrelevant]},
        ],
        lr=1e-28,
    )
    closure = closure_of(optimizer, weight, bias, x)

    def with_irrelevant() -> Tensor:
        loss = closure()
        irrelevant.grad = torch.rand_like(irrelevant)
        return loss

    with_irrelevant.loss_of = closure.loss_of
    assert_right_direction(optimizer, with_irrelevant, up=options.get("maximize", False))
    assert torch.equal(irrelevant, before)


def test_nothing_happens_without_gradients(plain: Any) -> None:
    params = [torch.randn(2, 3, requires_grad=False) for _ in range(2)]
    before = [p.clone() for p in params]
    optimizer = plain(params)
    for _ in range(2):
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert_same(params, before)
    assert not optimizer.state


def test_nothing_happens_for_gradients_of_zero(new: Any) -> None:
    param = torch.randn((5, 1), requires_grad=True)
    before = param.detach().clone()
    optimizer = new([param], weight_decay=0.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


def test_a_gradient_comes_later(new: Any) -> None:
    """One parameter has none in the first step and none in the third."""
    params = [Parameter(torch.randn(10, 5)), Parameter(torch.randn(10))]
    optimizer = new(params)
    for given in ((0,), (0, 1), (1,)):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if i in given else None
        optimizer.step()
        for i, p in enumerate(params):
            assert torch.equal(p, before[i]) == (i not in given)


def test_gradients_are_only_read(plain: Any) -> None:
    params = [Parameter(torch.randn(10, 5)), Parameter(torch.randn(5, 2, 3)[..., 0])]
    optimizer = plain(params)
    for p in params:
        p.grad = torch.randn_like(p)
    before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
    for _ in range(2):
        optimizer.step()
    for p, (grad, values, version) in zip(params, before, strict=True):
        assert p.grad is grad
        assert grad._version == version
        assert torch.equal(grad, values)


def test_a_closure_runs_once_with_gradients(plain: Any) -> None:
    weight, bias, x = linear()
    optimizer, calls = plain([weight, bias]), []
    closure = closure_of(optimizer, weight, bias, x)

    def counted() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return closure()

    with torch.no_grad():
        expected = (weight.mv(x) + bias).pow(2).sum()
        loss = optimizer.step(counted)
    assert calls == [True]
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_found_inf_skips_the_step(new: Any, scaled: bool) -> None:
    params = [Parameter(torch.ones(1)) for _ in range(5)]
    optimizer = new(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.grad_scale = torch.full((1,), 2.0) if scaled else None
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, torch.ones(1)) for p in params)
    for p in params:
        assert optimizer.state[p].get("step", torch.zeros(())) == 0
        assert all((v == 0).all() for k, v in optimizer.state[p].items() if k.startswith("exp_avg"))
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not any(torch.equal(p, torch.ones(1)) for p in params)


@over_optimizers
def test_default_dtype_does_not_matter(build: type) -> None:
    expected = None
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        weight, bias, x = linear()
        torch.set_default_dtype(dtype)
        try:
            optimizer = build([weight, bias], min_8bit_size=0, max_grad_norm=1.0)
            for _ in range(3):
                optimizer.step(closure_of(optimizer, weight, bias, x))
        finally:
            torch.set_default_dtype(torch.float32)
        expected = expected or snapshot(optimizer)
        assert_same(snapshot(optimizer), expected)


def test_complex_parameters_are_refused_with_the_reason(plain: Any) -> None:
    with pytest.raises(TypeError, match=r"params must be .*complex64.*no meaning.*torch\.view_as_real"):
        plain([torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)])


def test_a_step_takes_no_memory_after_the_first(new: Any) -> None:
    """torch's test of peak memory: no intermediates. amsgrad, without a kernel, needs what foreach may take."""
    params = [Parameter(torch.rand(16, 8)) for _ in range(10)]
    optimizer = new(params)
    for p in params:
        p.grad = torch.rand_like(p)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    taken = sum(e.self_cpu_memory_usage for e in seen.events() if e.self_cpu_memory_usage > 0)
    limit = 64  # the corrected step sizes of a group
    assert taken <= limit or optimizer.param_groups[0].get("amsgrad")


# ---- equality with a loop over parameters in fp64


def forloop(name: str, p: Tensor, g: Tensor, s: Options, o: Options) -> Tensor:
    """One step of a parameter as the docstrings have it, in fp64; ``s``: its state, empty at first."""
    s["t"] = s.get("t", 0) + 1
    m = s.get("m", torch.zeros_like(p))
    lr, decay = float(o["lr"]), o["weight_decay"]
    g = -g if o["maximize"] else g
    b1, b2 = (float(b) for b in o.get("betas", (0, 0)))
    if name == "Lion":
        p = p * (1 - lr * decay) - lr * torch.sign(b1 * m + (1 - b1) * g)
        s["m"] = b2 * m + (1 - b2) * g
        return p
    if name == "SGD":
        d = g + decay * p
        s["m"] = d if s["t"] == 1 else o["momentum"] * m + (1 - o["dampening"]) * d
        return p - lr * (d + o["momentum"] * s["m"] if o["nesterov"] else s["m"])
    clip = (lambda r, limit=1.0: min(r, limit)) if o.get("trust_clip") else (lambda r, limit=1.0: r)
    adapts = decay != 0 or o.get("always_adapt")
    if name == "LARS":
        if (coeff := o["trust_coeff"]) is None:
            s["m"] = m = o["momentum"] * m + (1 - o["momentum"]) * (g + decay * p)
            return p - lr * (clip(float(p.norm() / m.norm())) if adapts else 1) * m
        ratio = float(coeff * p.norm() / (g.norm() + decay * p.norm() + o["eps"])) if adapts else 1.0
        d = (clip(ratio, lr) if adapts else ratio) * (g + decay * p)
        s["m"] = d if s["t"] == 1 else o["momentum"] * m + (1 - o["dampening"]) * d
        return p - lr * (d + o["momentum"] * s["m"] if o["nesterov"] else s["m"])
    if name == "Adam" and not o["decoupled_weight_decay"]:
        g = g + decay * p
    elif name in ("Adam", "AdamW") or o.get("decoupled_decay"):
        p = p * (1 - lr * decay)
    s["m"] = m = b1 * m + (1 - b1) * g
    s["v"] = v = b2 * s.get("v", torch.zeros_like(p)) + (1 - b2) * g * g
    if o.get("amsgrad"):
        s["max"] = v = torch.maximum(v, s.get("max", v))
    c1, c2 = (1 - b1 ** s["t"], 1 - b2 ** s["t"]) if o.get("bias_correction", True) else (1, 1)
    u = m / c1 / ((v / c2).sqrt() + o["eps"])
    if name != "LAMB":
        return p - lr * u
    u = u if o["decoupled_decay"] else u + decay * p
    return p - lr * (clip(float(p.norm() / u.norm())) if adapts else 1) * u


TOLERANCES = {torch.float64: (1e-13, 1e-11), torch.float32: (1e-6, 1e-5)}


@pytest.mark.parametrize(
    ("dtype", "strided"),
    [
        pytest.param(torch.float64, False, id="fp64"),
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.float32, True, id="fp32, strided", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("build", "options"),
    [pytest.param(b, o, id=f"{b.__name__}-{n}") for b, n, o in CASES if not b.__name__.endswith("8bit")],
)
def test_equals_a_loop_over_the_parameters(
    build: type, options: Options, dtype: torch.dtype, strided: bool
) -> None:
    """What torch's foreach and fused implementations are asked."""
    options = copy.deepcopy({**options, "state_bits": 32})
    weight, bias, _ = linear(dtype, strided)
    optimizer = build([weight, bias], **options)
    group = optimizer.param_groups[0]
    expected, states = [p.detach().double().clone() for p in (weight, bias)], [{}, {}]
    for _ in range(7):
        for p in (weight, bias):
            p.grad = torch.randn_like(p)
        grads = [p.grad.double() for p in (weight, bias)]
        if limit := group["max_grad_norm"]:
            factor = min(1.0, limit / (float(torch.stack([g.norm() for g in grads]).norm()) + 1e-6))
            grads = [g * factor for g in grads]
        optimizer.step()
        expected = [
            forloop(build.__name__, *values, group) for values in zip(expected, grads, states, strict=True)
        ]
    atol, rtol = TOLERANCES[dtype]
    for p, e in zip((weight, bias), expected, strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p.detach().double(), e, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "name", [n for n in {**COMMON, **ADAM} if n not in ("8 bits", "dynamic", "max_grad_norm")]
)
@pytest.mark.parametrize("build", ["Adam", "AdamW"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=name_of)
def test_equals_torch(build: str, name: str, dtype: torch.dtype) -> None:
    # torch computes with a tensor's own precision.
    double: Callable[[Any], Any] = lambda v: v.double() if isinstance(v, Tensor) else v  # noqa: E731
    options = {
        k: tuple(map(double, v)) if k == "betas" else double(v)
        for k, v in {**COMMON, **ADAM}[name].items()
        if k not in ("foreach", "fused", "capturable")
    }
    weight, bias, x = linear(dtype)
    theirs = clones(weight, bias)
    optimizer = getattr(optim, build)([weight, bias], **copy.deepcopy(options))
    expected = getattr(torch.optim, build)(theirs, foreach=False, **copy.deepcopy(options))
    for _ in range(7):
        optimizer.step(closure_of(optimizer, weight, bias, x))
        expected.step(closure_of(expected, *theirs, x))
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close([weight, bias], theirs, atol=atol, rtol=rtol)


def test_parameters_of_many_dtypes_step_as_alone(plain: Any) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    options = {"state_bits": 32, "max_grad_norm": None}
    together = [Parameter(torch.randn(10, 5).to(dtype)) for dtype in dtypes for _ in range(2)]
    alone = clones(*together)
    one, many = plain(together, **options), [plain([p], **options) for p in alone]
    for _ in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        for optimizer in many:
            optimizer.step()
    assert_same(together, alone)


def test_devices_step_apart(new: Any) -> None:
    """The meta device stands for a second one."""
    here, there = Parameter(torch.randn(10, 5)), Parameter(torch.empty(6, 4, device="meta"))
    (alone,) = clones(here)
    optimizer, expected = new([here, there], max_grad_norm=None), new([alone], max_grad_norm=None)
    for _ in range(3):
        here.grad, there.grad = torch.randn_like(here), torch.empty_like(there)
        alone.grad = here.grad.clone()
        optimizer.step()
        expected.step()
    assert_same(here, alone)
    for key, value in optimizer.state[there].items():
        assert value.device.type == "meta", key
