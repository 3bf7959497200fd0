"""The same conditions for every test: backend, seed, threads."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  (Inductor imports it, and it refuses to come after distutils, which others import)
import torch

from tests.support import cache
from tests.support.simt import build

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test asks the network
# Inductor takes the instruction sets that the processor names, without compiling a program for each (30 s).
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

pytest.register_assert_rewrite("tests.support.generic_tests")
pytest_plugins = [
    "tests.support.interpreted",
    "tests.support.pairwise",
    "benchmarks.pytest_outcomes",
    "tests.support.skips",
]

# torch.manual_seed keeps a seed for each kind of device that is not there, with a formatted stack: 1.5 ms a test.
for _absent in (torch.cuda, torch.xpu, torch.mtia):
    if not _absent.is_available():
        _absent.manual_seed_all = lambda seed: None

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support import triton_interpreter  # noqa: F401  (repairs it


def pytest_collection_finish() -> None:
    _freeze()


def pytest_runtest_setup() -> None:
    if len(sys.modules) > _frozen_modules + 100:
        _freeze()


_frozen_modules = 0


def _freeze() -> None:
    """Garbage collections do not look through the 20,000 tests and the modules: many tests collect."""
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # for what nanobind looks for at the end: objects that were never freed


@pytest.fixture(scope="session")
def simt_library() -> tuple[CDLL, Path]:
    """csrc/cuda/ as CPU programs (tests/support/simt), its ops registered once a session."""
    path = cache.built("simt", build.compile_library, build.FLAGS) / build.LIBRARY
    return build.load(path), path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text for the tests of memkern.train."""
    from tests.support.train_helpers import TEXT

    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def corpus(text: Path) -> Any:
    from memkern.train import load_corpus

    return load_corpus([str(text)], seq_len=32)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Calls a function on several processes: ``ranks(2, function, *arguments)``."""
    from tests.support.ranks import Ranks

    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture
def no_process_group() -> Iterator[None]:
    """Ends the one that a test has made of its process alone."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def can_compile() -> None:
    """Skips a test where torch is older than what memkern.compile needs."""
    from tests.support.helpers import skip_unless_torch_compiles

    skip_unless_torch_compiles()


@pytest.fixture(scope="module")
def no_collector() -> Iterator[None]:
    importlib.import_module("torch._dynamo")  # torch does in the first backward pass, which leaves cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _same_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMKERN_BACKEND", "MEMKERN_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small: a second thread would only be waited for
