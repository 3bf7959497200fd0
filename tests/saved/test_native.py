"""The hooks in C++ (memkern._saved) beside Python's, which are their specification."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import memkern
from memkern import backend
from memkern.saved import built_for, extension, link, storage
from memkern.saved.session import Session, new_session

from .helpers import Model, gradients, ids, same, warm_model

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason=f"{extension.missing()}")
BITS = pytest.mark.parametrize("bits", ["exact", 8])


@pytest.fixture
def native() -> Any:
    return importlib.import_module("memkern.saved.native")


def _step(model: Model, bits: Any) -> Tensor:
    with memkern.quantize_saved(bits):
        return model(ids()).square().mean()


@BITS
@pytest.mark.parametrize("runs", [True, False])
def test_nothing_is_held_after_a_graph(bits: Any, runs: bool, native: Any) -> None:
    model, core = Model(), native._saved
    gc.collect()
    before = core.registered(), core.spared()
    gc.disable()
    try:
        loss = _step(model, bits)
        assert core.registered() > before[0]
        if runs:
            loss.backward()  # the loss, and with it the graph's nodes, is still alive
        else:
            del loss
        assert (core.registered(), core.spared()) == before
    finally:
        gc.enable()


@BITS
def test_hardly_an_object_for_the_garbage_collector(bits: Any) -> None:
    model, x, before = warm_model(bits)
    y = model(x)
    made = [o for o in gc.get_objects() if id(o) not in before]
    assert len(made) < 20  # of more than 100 saved tensors
    del y


@pytest.mark.full
@BITS
def test_steps_leak_nothing(bits: Any, native: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = Model()
    for step in range(300):
        _step(model, bits).backward()
        if step == 50:
            gc.collect()
            objects, before = len(gc.get_objects()), resident()
    gc.collect()
    assert len(gc.get_objects()) <= objects + 50
    assert resident() <= before + 2**24  # notes of nodes, alive or not, grow to 12 MB (nodes.h)
    assert not native._saved.registered()


def test_the_interpreter_ends_while_a_graph_is_alive() -> None:
    code = """
import torch, memkern
from memkern.saved import extension
from memkern.saved.session import new_session
assert extension.missing() is None
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
for bits in ("exact", 8):
    with memkern.quantize_saved(bits):
        y = model(torch.randn(64, 64))
    globals()[f"kept {bits}"] = y.softmax(-1).sum(), y
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_goes_on_with_its_parent_s_graph() -> None:
    code = """
import os, torch, memkern
from memkern.saved import extension
assert extension.missing() is None
torch.set_num_threads(1)  # OpenMP's threads are not there after a fork, which it would wait for
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
memkern.compress(model, saved_bits=8)
x = torch.randn(64, 64)
kept = model(x).sum()
child = os.fork()
found = [g.sum().item() for loss in (kept, model(x).sum()) for g in torch.autograd.grad(loss, list(model.parameters()))]
assert found[:4] == found[4:]
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


# ---- errors


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_pack_hook_leaves_the_next_step_alone(
    error: type[BaseException], native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    memkern.compress(model, saved_bits=8)
    expected = gradients(model, lambda: model(ids()))
    asked = []

    def fail(*args: Any) -> Any:
        asked.append(args)
        if len(asked) == 3:
            raise error("in a hook")
        return storage.is_managed(*args)

    with monkeypatch.context() as patch:
        patch.setattr(native, "is_managed", fail)
        with pytest.raises(error, match="in a hook"):
            model(ids()).square().mean().backward()
    assert same(gradients(model, lambda: model(ids())), expected)


def test_an_error_in_a_backward_pass_allows_another(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def loss() -> Tensor:
        with memkern.quantize_saved(8):
            return ((x @ x).softmax(-1) @ x).square().mean()

    (expected,) = torch.autograd.grad(loss(), x)

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    kept = loss()
    with monkeypatch.context() as patch:
        patch.setattr(native, "decode", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            kept.backward(retain_graph=True)
    (found,) = torch.autograd.grad(kept, x)
    assert torch.equal(found, expected)


def test_threads_have_their_own_graphs() -> None:
    models = [Model() for _ in range(4)]
    expected = [gradients(model, lambda: _step(model, 8)) for model in models]  # noqa: B023
    found: dict[int, Any] = {}

    def train(i: int) -> None:
        for _ in range(5):
            found[i] = gradients(models[i], lambda: _step(models[i], 8))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[i], expected[i]) for i in range(4))


# ---- which one runs


def _why(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.delenv("MEMKERN_SAVED", raising=False)
    if choice is not None:
        monkeypatch.setenv("MEMKERN_SAVED", choice)
    return extension.missing.__wrapped__()


def test_a_choice_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _why(None, monkeypatch) is _why("native", monkeypatch) is None
    assert _why("python", monkeypatch) == "MEMKERN_SAVED=python asks for them"
    with pytest.raises(ValueError, match="MEMKERN_SAVED must be python or native, got 'cpp'"):
        _why("cpp", monkeypatch)
    assert backend.report()["build"]["saved_tensors"] == "C++"


def test_another_torch_s_extension_is_not_loaded(tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = torch.version.git_version.encode()
    data = Path(native._saved.__file__).read_bytes()
    assert data.count(commit) == 1
    other = tmp_path / "_saved.so"
    other.write_bytes(data.replace(commit, commit[::-1]))
    spec = importlib.machinery.ModuleSpec("memkern._saved", None, origin=str(other))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    reason = _why("native", monkeypatch)
    assert reason is not None
    assert commit[::-1].decode() in reason
    assert "reinstall memkern" in reason
    other.write_bytes(b"no extension")
    assert "another memkern" in str(_why("native", monkeypatch))
    monkeypatch.setattr(extension, "missing", lambda: reason)
    assert backend.report()["build"]["saved_tensors"] == f"Python: {reason}"


def test_one_of_other_python_files_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(extension.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert built_for.sources_hash(tmp_path) in extension.stamp()
    (tmp_path / "users.py").write_text("edited")
    edited = built_for.sources_hash(tmp_path)
    monkeypatch.setattr(built_for, "sources_hash", lambda folder: edited)
    assert edited in str(_why("native", monkeypatch))


def test_an_extension_that_was_not_built_or_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "was not built" in str(_why("native", patch))

    def fail(name: str) -> Any:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert "does not load (ImportError: undefined symbol)" in str(_why("native", monkeypatch))


def test_under_a_mode_the_hooks_are_python_s(native: Any) -> None:
    def kind(**options: Any) -> type:
        return type(new_session(8, **options))

    assert kind() is native.NativeSession
    assert kind(offload=link.Offload(None, 1)) is native.NativeSession
    for around in (torch.autograd.graph.save_on_cpu(), memkern.quantize_saved(8)):
        with around:
            assert kind() is native.NativeSession
    with FakeTensorMode():
        assert kind() is Session
        with memkern.quantize_saved(8):
            assert kind() is Session
