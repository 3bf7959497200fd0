"""LAMB and LARS train a small GPT by their published updates, and step as timm's do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memkern import optim
from memkern.train import GPT, Corpus, TrainConfig
from tests.support import timm_optim
from tests.support.helpers import make_params, on, over_cpu, train
from tests.support.optimizers import FormulaOptimizer, cases

PUBLISHED = cases("published")


def small_gpt() -> tuple[torch.nn.Module, Callable[[int], Tensor]]:
    """GPT-2's tensors at a small width, and its loss at a step on the bytes of this file."""
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=32, seq_len=16)
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    corpus = Corpus(text, text, __file__)

    def loss(step: int) -> Tensor:
        [(inputs, targets)] = corpus.step(TrainConfig(seq_len=16), step)
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return model, loss


@over_cpu
@pytest.mark.parametrize(
    "name", [n if n in ("LAMB", "LARS") else pytest.param(n, marks=pytest.mark.full) for n in PUBLISHED]
)
def test_fifty_steps_of_a_gpt_are_the_published_ones(backend: str, name: str) -> None:
    spec, options = PUBLISHED[name]
    model, loss = small_gpt()
    groups = optim.param_groups(model, weight_decay=options["weight_decay"])
    params = [p for group in groups for p in group["params"]]
    optimizer = spec.cls(groups, **options)
    decay_of = {p: group["weight_decay"] for group in groups for p in group["params"]}
    truth = {p: torch.nn.Parameter(p.detach().double()) for p in params}
    published = FormulaOptimizer(spec, [{"params": [truth[p]], "weight_decay": decay_of[p]} for p in params], **options)
    start = [p.detach().clone() for p in params]
    with on(backend):
        for step in range(50):
            optimizer.zero_grad()
            loss(step).backward()
            for p, fp64 in truth.items():
                fp64.grad = p.grad.double()
            published.step()
            optimizer.step()
    for (p, fp64), before in zip(truth.items(), start, strict=True):
        assert p.dim() < 2 or (p - before).norm() > 1e-3 * before.norm()  # matrices have moved
        assert (p - fp64).norm() <= 1e-5 * fp64.norm()  # 170 roundings of 2^-24 in fifty steps


# The cases whose class and options timm has; of LARS the classic ones alone.
OF_TIMM = [
    name
    for name, (spec, options) in PUBLISHED.items()
    if spec.timm and (spec.name != "LARS" or "trust_coeff" in options)
]


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_moves_parameters_alike(name: str) -> None:
    spec, options = PUBLISHED[name]
    try:
        timm = timm_optim.load(spec.timm)
    except ModuleNotFoundError:
        pytest.skip("timm is not installed; its update is in tests/support/optimizers too")
    runs = []
    for make, class_options in ((spec.cls, {}), (timm, spec.timm_options)):
        params = make_params(seed=3)
        optimizer = make(params, **class_options | options)
        runs.append(train(optimizer, 50)["params"])
    for ours, theirs in zip(*runs, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
