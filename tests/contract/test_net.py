"""Old files and results hold: checkpoints go on, results come out bit for bit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.fixtures import make_checkpoints, make_hashes
from tests.support.helpers import ISAS, skip_other_norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextlib.contextmanager
def on(backend: str) -> Iterator[str]:
    """Runs the ops on a backend, or on the C++ one with an instruction set; gives the device."""
    with pytest.MonkeyPatch.context() as patch:
        if backend in ISAS:
            patch.setenv("MEMKERN_CPU_ISA", backend)
        with memkern.use_backend("cpu" if backend in ISAS else backend):
            yield _device_of(backend)


def _device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" or (backend == "triton" and not INTERPRETED) else "cpu"


def _why_not(backend: str) -> str | None:
    if _device_of(backend) == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if backend not in ISAS:
        return memkern.backend.available()[backend]
    if reason := memkern.backend.available()["cpu"]:
        return reason
    with on(backend):
        runs = memkern.report()["cpu"]["instruction_set"]
    return None if runs == backend else f"this processor has no {backend}: {runs} would run"


def _param(backend: str, *values: Any, slow: bool = False, long: bool = False) -> Any:
    reason = _why_not(backend)
    marks = [pytest.mark.skipif(reason is not None, reason=str(reason))]
    if _device_of(backend) == "cuda":
        marks.append(pytest.mark.gpu)
    if slow:
        marks.append(pytest.mark.full)
    if long:
        marks.append(pytest.mark.long)
    return pytest.param(backend, *values, marks=marks, id="-".join((backend, *values)))


# ---- results

HASHES = json.loads(make_hashes.FILE.read_text())
QUICK = ("AdamW", "activations", "blockwise", "affine", "linear")
SLOW = ("reference", "generic")  # half a minute each for all groups
LONG = ("Adam8bit", "LAMB8bit", "LARS8bit", "SGD8bit")  # 15 s each on the reference: AdamW8bit's and Lion8bit's moments


@pytest.mark.parametrize(
    ("backend", "group"),
    [
        _param(
            *(backend, group),
            slow=backend in SLOW and group not in QUICK,
            long=backend == "reference" and group in LONG,
        )
        for group in make_hashes.GROUPS
        for backend in ("reference", *ISAS, "cuda", "triton")
        if group not in ("affine", "linear") or backend in ("reference", "cuda")  # these groups have no kernels
    ],
)
def test_results_are_those_of_the_hashes(backend: str, group: str) -> None:
    if group.startswith(("LAMB", "LARS")):
        skip_other_norms(backend)
    cases = make_hashes.GROUPS[group]()
    assert [*cases] == [*HASHES[group]], "cases were added or removed: see fixtures/make_hashes.py"
    wrong = []
    with on(backend) as device:
        for name, run in cases.items():
            found, expected = run(device), HASHES[group][name]
            # A state may have more entries than it had.
            if differing := [key for key in expected if found.get(key) != expected[key]]:
                wrong.append(f"{name}: {', '.join(differing)}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(wrong[:20])


# ---- checkpoints

over_cpu = pytest.mark.parametrize("backend", [_param("reference"), _param("cpu")])


@functools.cache
def _saved(name: str) -> Any:
    return torch.load(make_checkpoints.FOLDER / f"{name}.pt", weights_only=True)


@over_cpu
@pytest.mark.parametrize("build", make_hashes.BUILDS)
def test_a_checkpoint_goes_on(build: str, backend: str) -> None:
    saved = _saved("states")[build]
    assert [*saved] == [*make_checkpoints.cases(build)]
    for name, case in saved.items():
        with on(backend):
            optimizer, params = make_checkpoints.continued(build, case)
        for i, (p, expected) in enumerate(zip(params, case["params_after"], strict=True)):
            assert torch.equal(p, expected), f"{name}: parameter {i}"
        found = make_hashes.hashes_of(optimizer)
        wrong = [key for key, value in case["hashes_after"].items() if found.get(key) != value]
        assert not wrong, f"{name}: {wrong}"


@over_cpu
@pytest.mark.parametrize("build", make_hashes.BUILDS)
def test_a_pickled_optimizer_goes_on(build: str, backend: str) -> None:
    optimizer = pickle.loads(make_checkpoints.pickles("optimizers")[build])
    assert type(optimizer) is getattr(optim, build)
    with on(backend):
        after = make_checkpoints.step_of(build, optimizer)
    for p, expected in zip(after, _saved("after")[build], strict=True):
        assert torch.equal(p, expected)


@pytest.mark.parametrize("name", make_checkpoints.modules())
def test_a_pickled_module_works(name: str) -> None:
    module = pickle.loads(make_checkpoints.pickles("modules")[name])
    fresh = make_checkpoints.modules()[name]
    assert [type(m) for m in module.modules()] == [type(m) for m in fresh.modules()]
    assert repr(module) == repr(fresh)
    fresh.load_state_dict(module.state_dict())
    x = torch.arange(54) % 9 if name == "StableEmbedding" else make_hashes.values(name, 54, top=2, span=6)
    x = x.view(9, 6)
    found = []
    for each in (module, fresh):
        given = x.clone().requires_grad_(x.dtype.is_floating_point)
        targets = [torch.arange(9) % 5] if name == "LinearCrossEntropy" else []
        y = each(given, *targets)
        y.backward(make_hashes.values(f"{name} gradient", y.numel()).view_as(y))
        found.append([y, given.grad, *(p.grad for p in each.parameters())])
    for old, new in zip(*found, strict=True):
        assert old is new is None or torch.equal(old, new)


def test_fixtures_are_of_every_public_class() -> None:
    modules = {c.__name__ for c in vars(memkern.nn).values() if isinstance(c, type) and issubclass(c, torch.nn.Module)}
    assert modules <= {*make_checkpoints.modules()}
    classes = {c.__name__ for c in vars(optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    wrappers = {"HostOffload", "StepInBackward"}  # they have the states of the optimizers inside
    of_products = {"Muon", "Muon8bit"}  # the bits of matrix products are a machine's own
    assert classes - wrappers - of_products == {*make_hashes.BUILDS}
