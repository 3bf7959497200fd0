"""LAMB and LARS against their published updates and timm's, on a small GPT."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from memkern.train.data import windows
from memkern.train.model import GPT
from tests.support import timm_optim
from tests.support.helpers import (
    make_params,
    on,
    over_cpu,
    train,
)

# ---- the published updates, in fp64


class Published(torch.optim.Optimizer):
    """An update in fp64, on the gradients of other parameters: ``params64`` maps those to ours."""

    def __init__(self, params: list[Tensor], update: Callable[..., Tensor], **options: Any) -> None:
        self.params64 = [torch.nn.Parameter(p.detach().double()) for p in params]
        super().__init__(self.params64, {})
        self.update, self.options = update, options

    @torch.no_grad()
    def follow(self, params: list[Tensor], decays: list[float]) -> None:
        for p, fp64, decay in zip(params, self.params64, decays, strict=True):
            g = p.grad.double()
            fp64.copy_(self.update(fp64, g, self.state[fp64], **self.options | {"weight_decay": decay}))


def ratio_of(x: Tensor, update: Tensor, clip: bool) -> float:
    found = float(x.norm() / update.norm()) if x.norm() > 0 and update.norm() > 0 else 1.0
    return min(found, 1.0) if clip else found


def lamb(
    x: Tensor,
    g: Tensor,
    state: dict[str, Any],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    bias_correction: bool = True,
    trust_clip: bool = False,
    always_adapt: bool = False,
    decoupled_decay: bool = False,
) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962, with timm.optim.Lamb's options."""
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g * g
    if bias_correction:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    update = m / (v.sqrt() + eps)
    if decoupled_decay:
        x = x * (1 - lr * weight_decay)
    else:
        update = update + weight_decay * x
    adapts = weight_decay != 0 or always_adapt
    return x - lr * (ratio_of(x, update, trust_clip) if adapts else 1.0) * update


def lars(
    x: Tensor,
    g: Tensor,
    state: dict[str, Any],
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    trust_clip: bool = False,
    always_adapt: bool = False,
) -> Tensor:
    """Algorithm 1 of arXiv 1904.00962."""
    m = state["m"] = momentum * state.get("m", 0) + (1 - momentum) * (g + weight_decay * x)
    adapts = weight_decay != 0 or always_adapt
    return x - lr * (ratio_of(x, m, trust_clip) if adapts else 1.0) * m


def classic_lars(
    x: Tensor,
    g: Tensor,
    state: dict[str, Any],
    lr: float,
    weight_decay: float,
    trust_coeff: float,
    momentum: float = 0.9,
    dampening: float = 0.0,
    nesterov: bool = False,
    eps: float = 1e-8,
    trust_clip: bool = False,
    always_adapt: bool = False,
) -> Tensor:
    """The update of arXiv 1708.03888 on top of torch.optim.SGD's, with timm.optim.Lars's options."""
    ratio = 1.0
    if (weight_decay != 0 or always_adapt) and x.norm() > 0 and g.norm() > 0:
        ratio = float(trust_coeff * x.norm() / (g.norm() + weight_decay * x.norm() + eps))
        if trust_clip:
            ratio = min(ratio / lr, 1.0)
    d = ratio * (g + weight_decay * x)
    m = state["m"] = momentum * state["m"] + (1 - dampening) * d if "m" in state else d
    return x - lr * (d + momentum * m if nesterov else m)


PUBLISHED: dict[str, tuple[type, Callable[..., Tensor], dict[str, Any]]] = {
    "LAMB": (optim.LAMB, lamb, {"lr": 1e-2, "weight_decay": 0.1}),
    "LAMB, no decay": (optim.LAMB, lamb, {"lr": 1e-3, "weight_decay": 0.0}),
    "LAMB, clipped": (optim.LAMB, lamb, {"lr": 1e-2, "weight_decay": 0.01, "trust_clip": True}),
    "LAMB, no decay, adapted": (optim.LAMB, lamb, {"lr": 1e-2, "weight_decay": 0.0, "always_adapt": True}),
    "LAMB, decoupled": (optim.LAMB, lamb, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_decay": True}),
    "LAMB, uncorrected": (optim.LAMB, lamb, {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False}),
    "LARS": (optim.LARS, lars, {"lr": 1e-2, "weight_decay": 1e-4}),
    "LARS, no decay": (optim.LARS, lars, {"lr": 1e-2, "weight_decay": 0.0}),
    "LARS, clipped": (optim.LARS, lars, {"lr": 1e-2, "weight_decay": 1e-2, "trust_clip": True}),
    "classic LARS": (optim.LARS, classic_lars, {"lr": 1.0, "weight_decay": 1e-4, "trust_coeff": 1e-2}),
    "classic LARS, Nesterov": (
        optim.LARS,
        classic_lars,
        {"lr": 1.0, "weight_decay": 1e-3, "trust_coeff": 1e-2, "nesterov": True, "momentum": 0.8},
    ),
    "classic LARS, clipped": (
        optim.LARS,
        classic_lars,
        {"lr": 1e-2, "weight_decay": 1e-4, "trust_coeff": 1e-2, "trust_clip": True, "dampening": 0.5},
    ),
    "classic LARS, no decay, adapted": (
        optim.LARS,
        classic_lars,
        {"lr": 1.0, "weight_decay": 0.0, "trust_coeff": 1e-2, "always_adapt": True},
    ),
}


def small_gpt() -> tuple[torch.nn.Module, Callable[[int], Tensor]]:
    """GPT-2's tensors at a small width, and a loss on the bytes of this file."""
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=32, seq_len=16)
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)

    def loss(step: int) -> Tensor:
        starts = torch.randint(len(text) - 17, (4,), generator=torch.Generator().manual_seed(step))
        inputs, targets = windows(text, starts, 16)
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return model, loss


@over_cpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_fifty_steps_of_a_gpt_are_the_published_ones(backend: str, name: str) -> None:
    build, update, options = PUBLISHED[name]
    model, loss = small_gpt()
    groups = optim.param_groups(model, weight_decay=options["weight_decay"])
    params = [p for group in groups for p in group["params"]]
    decays = [group["weight_decay"] for group in groups for _ in group["params"]]
    optimizer, truth = build(groups, **options), Published(params, update, **options)
    start = [p.detach().clone() for p in params]
    with on(backend):
        for step in range(50):
            optimizer.zero_grad()
            loss(step).backward()
            truth.follow(params, decays)
            optimizer.step()
    for p, fp64, before in zip(params, truth.params64, start, strict=True):
        assert p.dim() < 2 or (p - before).norm() > 1e-3 * before.norm()
        assert (p - fp64).norm() <= 1e-5 * fp64.norm()


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name][1] is not lars])
def test_timm_moves_parameters_alike(name: str) -> None:
    build, update, options = PUBLISHED[name]
    try:
        timm = timm_optim.load("Lamb" if update is lamb else "Lars")
    except ModuleNotFoundError:
        pytest.skip("timm is not installed; its update is in this file too")
    runs = []
    for make, own in ((build, {}), (timm, {"max_grad_norm": None} if update is lamb else {"momentum": 0.9})):
        params = make_params(seed=3)
        optimizer = make(params, **own | options)
        runs.append(train(optimizer, 50)["params"])
    for ours, theirs in zip(*runs, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.full
@over_cpu
@pytest.mark.parametrize("codec", ["power", "dynamic"])
@pytest.mark.parametrize("name", ["LAMB", "LAMB, clipped", "LARS", "classic LARS"])
def test_8_bit_trust_ratios_are_within_two_percent(backend: str, name: str, codec: str) -> None:
    build, _, options = PUBLISHED[name]
    model, loss = small_gpt()
    params = [p for p in model.parameters() if p.dim() > 1]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    eight = build(params, state_bits=8, min_8bit_size=0, codec=codec, **options)
    full = build(copies, **options)
    worst = 0.0
    with on(backend):
        for step in range(50):
            model.zero_grad()
            loss(step).backward()
            for p, copy in zip(params, copies, strict=True):
                copy.grad = p.grad
            eight.step()
            full.step()
            for a, b in zip(eight.trust_ratios().values(), full.trust_ratios().values(), strict=True):
                worst = max(worst, float(abs(a - b) / b))
    # Measured: .006 and .030 (LAMB, where a code of v at 0 is as good as a zero).
    assert worst <= {"power": 0.02, "dynamic": 0.04}[codec]
    assert {state["exp_avg"].dtype for state in eight.state.values()} == {torch.int8}
