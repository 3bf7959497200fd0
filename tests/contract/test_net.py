"""Every backend has the results of tests/fixtures/hashes.json bit for bit; a pickled module computes the same bits."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.fixtures import make_hashes
from tests.support.helpers import ISAS, device_of, marks_of, on, skip_other_norms

# ---- results

HASHES = json.loads(make_hashes.FILE.read_text())
# What decides the tier of a group of cases on the reference (case()).
QUICK_GROUPS = ("AdamW", "activations", "blockwise", "affine", "linear")
# With moments like AdamW8bit's and Lion8bit's.
LONG_GROUPS = ("Adam8bit", "LAMB8bit", "LARS8bit", "SGD8bit")


def case(backend: str, group: str) -> Any:
    marks = marks_of(backend)
    if backend == "reference" and group not in QUICK_GROUPS:
        marks.append(pytest.mark.long if group in LONG_GROUPS else pytest.mark.full)
    return pytest.param(backend, group, marks=marks, id=f"{backend}-{group}")


@pytest.mark.parametrize(
    ("backend", "group"),
    [
        case(backend, group)
        for group in make_hashes.GROUPS
        for backend in ("reference", *ISAS[1:], "cuda", "triton")
        if group not in ("affine", "linear") or backend in ("reference", "cuda")  # these groups have no kernels
    ],
)
def test_results_are_those_of_the_hashes(backend: str, group: str) -> None:
    if group.startswith(("LAMB", "LARS")):
        skip_other_norms(backend)
    cases = make_hashes.GROUPS[group]()
    assert [*cases] == [*HASHES[group]], "cases were added or removed: see fixtures/make_hashes.py"
    wrong = []
    with on(backend):
        for name, run in cases.items():
            actual, expected = run(device_of(backend)), HASHES[group][name]
            # A state may have entries that were not there when the hashes were recorded.
            if differing := [key for key in expected if actual.get(key) != expected[key]]:
                wrong.append(f"{name}: {', '.join(differing)}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(wrong[:20])


# ---- pickles


# arguments of the constructors of memkern.nn's modules, by position (ARGUMENTS) and by name (OPTIONS)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "GELU": ("tanh",), "Softplus": (2.0, 4.0), "ELU": (0.5,), "CELU": (2.0,), "Hardshrink": (0.25,),
    "Softshrink": (0.25,), "Threshold": (0.25, -2.0), "LeakyReLU": (0.25,), "Hardtanh": (0.0, 6.0),
    "RandomizedLinear": (6, 4), "StableEmbedding": (9, 6), "LinearCrossEntropy": (6, 5),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "GELU": {"bits": 2}, "Tanh": {"bits": 4}, "ELU": {"bits": 2}, "RandomizedLinear": {"projection": "dct"},
    "LinearCrossEntropy": {"label_smoothing": 0.125},
}  # fmt: skip


def public(namespace: Any, base: type) -> list[str]:
    """The names of the classes in a module that derive from ``base``."""
    return [c.__name__ for c in vars(namespace).values() if isinstance(c, type) and issubclass(c, base)]


def module(name: str) -> torch.nn.Module:
    """A module of a public class, or a compressed model."""
    torch.manual_seed(0)
    if name == "FewBit":
        return memkern.nn.few_bit(torch.sin, torch.cos, bits=2)
    if name == "compressed":
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6))
        memkern.compress(model)
        return model
    return getattr(memkern.nn, name)(*ARGUMENTS.get(name, ()), **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", [*public(memkern.nn, torch.nn.Module), "compressed"])
def test_a_pickled_module_computes_the_same_bits(name: str) -> None:
    fresh = module(name)
    copied = pickle.loads(pickle.dumps(fresh))
    assert [type(m) for m in copied.modules()] == [type(m) for m in fresh.modules()]
    assert repr(copied) == repr(fresh)
    x = torch.arange(54) % 9 if name == "StableEmbedding" else make_hashes.values(name, 54, top=2, span=6)
    x = x.view(9, 6)
    results = []
    for candidate in (copied, fresh):
        inputs = x.clone().requires_grad_(x.dtype.is_floating_point)
        targets = [torch.arange(9) % 5] if name == "LinearCrossEntropy" else []
        y = candidate(inputs, *targets)
        y.backward(make_hashes.values(f"{name} gradient", y.numel()).view_as(y))
        results.append([y, inputs.grad, *(p.grad for p in candidate.parameters())])
    for of_copy, of_original in zip(*results, strict=True):
        assert of_copy is of_original is None or torch.equal(of_copy, of_original)


def test_hashes_are_of_every_optimizer() -> None:
    wrappers = {"HostOffload", "StepInBackward"}  # they have the states of the optimizers inside
    of_products = {"Muon", "Muon8bit"}  # the bits of matrix products are a machine's own
    assert {*public(optim, torch.optim.Optimizer)} - wrappers - of_products == {*make_hashes.BUILDS}
