"""memkern.backend chooses by device, use_backend and MEMKERN_BACKEND, and says why a backend is not available."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import TestCase

import pytest
import torch

import memkern
from memkern import backend, optim
from memkern.__main__ import main
from tests.support.helpers import ISAS, fast_here, needs_cpp

ROOT = Path(memkern.__file__).parents[1]


def python(code: str, *options: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process without memkern's variables, but with these ones."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEMKERN_") and k != "PYTHONPATH"} | environment
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_every_public_name_exists() -> None:
    for name in memkern.__all__:
        assert getattr(memkern, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = memkern.nothing


# ---- choice


def test_every_device_has_a_backend() -> None:
    reasons = backend.available()
    assert tuple(reasons) == backend.BACKENDS == ("cpu", "cuda", "triton", "reference")
    assert all(reasons[backend.select(device)] is None for device in ("cpu", "cuda", "xpu", "meta"))
    assert backend.select("cpu") == ("cpu" if reasons["cpu"] is None else "reference")


def test_use_backend_holds_inside_its_block_and_may_be_nested() -> None:
    outside = backend.select("cpu")
    with memkern.use_backend("reference"):
        assert backend.select("cpu") == "reference"
        assert backend.select("cuda") == "reference"
        if backend.available()["cpu"] is None:
            with memkern.use_backend("cpu"):
                assert backend.select("cpu") == "cpu"
        assert backend.select("cpu") == "reference"
    assert backend.select("cpu") == outside
    with pytest.raises(ZeroDivisionError), memkern.use_backend("reference"):
        _ = 1 / 0
    assert backend.select("cpu") == outside


@needs_cpp
def test_use_backend_may_end_in_another_order_than_it_began() -> None:
    """As in two threads, or in generators that are closed late."""
    outside = backend.select("cpu")
    first, second = memkern.use_backend("reference"), memkern.use_backend("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert backend.select("cpu") == "cpu"
    second.__exit__(None, None, None)
    assert backend.select("cpu") == outside


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of cpu, cuda, triton, reference, got 'tpu'"), memkern.use_backend("tpu"):
        pass


@pytest.mark.parametrize("name", backend.BACKENDS)
def test_a_backend_that_is_not_there_says_why(name: str) -> None:
    reason = backend.available()[name]
    if reason is None:
        with memkern.use_backend(name):
            pass
        return
    with pytest.raises(RuntimeError, match=f"backend '{name}' is not available: ") as error, memkern.use_backend(name):
        pass
    assert reason in str(error.value)
    assert backend.select("cpu") in ("cpu", "reference")  # and the attempt left no trace


@needs_cpp
def test_a_backend_for_other_tensors_says_what_helps() -> None:
    with (
        memkern.use_backend("cpu"),
        pytest.raises(RuntimeError, match=r"does not run on cuda tensors; move .*cuda, triton"),
    ):
        backend.select("cuda")


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backend, "_missing", lambda name, index=None: None if name == "reference" else f"no {name} today"
    )
    monkeypatch.setattr(backend, "_chosen", {})
    with TestCase().assertLogs("memkern") as logged:
        assert backend.select("cpu") == "reference"
        assert backend.select("cpu") == "reference"
    assert [r.message for r in logged.records] == ["backend 'cpu' is not available for cpu tensors: no cpu today"]
    assert backend.available()["cpu"] == "no cpu today"
    with pytest.raises(RuntimeError, match="no cpu today"), memkern.use_backend("cpu"):
        pass


class FakeCuda:
    """Patches what memkern.backend asks of torch: a process has two GPUs, and calls on device 1 fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, message: str = "no kernel image is available") -> None:
        self.message, self.calls, self.capturing = message, [], False
        ones = torch.ones
        monkeypatch.setattr(backend, "_missing_cuda", lambda: None)
        monkeypatch.setattr(backend, "_cuda_failures", {})
        monkeypatch.setattr(backend, "_chosen", {})
        monkeypatch.setattr(torch, "ones", lambda n, dtype, device: self.called(device) or ones(n, dtype=dtype))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    def called(self, device: str) -> None:
        self.calls.append(device)
        if device == "cuda:1":
            raise RuntimeError(f"quantize_blockwise: {self.message}\nand more")


def without_cuda() -> str:
    """The backend of CUDA tensors where the CUDA kernels do not run."""
    return "triton" if backend.available()["triton"] is None else "reference"


def test_cuda_is_available_on_devices_where_a_call_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback, cuda = without_cuda(), FakeCuda(monkeypatch)
    with TestCase().assertLogs("memkern", "WARNING") as logged:
        for _ in range(3):
            assert backend.select(torch.device("cuda", 0)) == "cuda"
            assert backend.select(torch.device("cuda", 1)) == fallback
            assert backend.select("cuda") == "cuda"
    assert cuda.calls == ["cuda:0", "cuda:1"]  # once a device
    assert len(logged.records) == 1
    reason = str(backend._missing("cuda", 1))
    assert "cuda:1, GPU 1: quantize_blockwise: no kernel image is available; reinstall" in reason
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend.available()["cuda"] == reason
    with pytest.raises(RuntimeError, match="no kernel image is available"), memkern.use_backend("cuda"):
        pass


@needs_cpp
def test_torchs_default_dtype_is_no_failure_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    torch.set_default_dtype(torch.float64)
    try:
        assert backend.select(torch.device("cuda", 0)) == "cuda"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("own", [True, False], ids=["this stream's", "another stream's"])
def test_a_capture_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    message = "operation would make the legacy stream depend on a capturing blocking stream"
    fallback, cuda = without_cuda(), FakeCuda(monkeypatch, message)
    cuda.capturing = own
    assert backend.select(torch.device("cuda", 1)) == "cuda"
    assert cuda.calls == ([] if own else ["cuda:1"])  # nothing may run in the capture of this stream
    cuda.capturing, cuda.message = False, "no kernel image is available"
    assert backend.select(torch.device("cuda", 1)) == fallback


def test_cuda_is_not_called_while_a_program_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    @torch.compiler.assume_constant_result
    def chosen() -> str:
        return backend.select(torch.device("cuda", 1))

    lengths = []

    @torch.compile(backend=lambda graph, inputs: graph.forward, fullgraph=True)
    def traced(x: torch.Tensor) -> torch.Tensor:
        return x + len(chosen())

    lengths.append(float(traced(torch.zeros(()))))
    with torch.utils.flop_counter.FlopCounterMode(display=False):  # any dispatch mode
        lengths.append(len(backend.select(torch.device("cuda", 1))))
    assert lengths == [len("cuda")] * 2
    assert cuda.calls == []


def python_files(to: Path) -> Path:
    """A copy of the package as it is where nothing was compiled: the Python files alone."""
    for file in [*(ROOT / "memkern").rglob("*.py")]:
        target = to / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    return to


@pytest.mark.full
def test_the_package_works_without_the_library(tmp_path: Path) -> None:
    code = (
        "import memkern, torch\n"
        "from memkern import backend\n"
        "backend.shadowed = lambda: None  # whatever else this Python has installed\n"
        "from memkern.optim import AdamW8bit\n"
        f"assert memkern.__file__.startswith({str(tmp_path)!r}), memkern.__file__\n"
        "p = torch.nn.Parameter(torch.ones(64, 128)); p.grad = torch.ones(64, 128)\n"
        "AdamW8bit([p]).step()\n"
        "assert p.detach().max() < 1\n"
        "torch.ops.memkern.quantize_blockwise(p.detach(), 0, True, 128)\n"
        "AdamW8bit([p]).step()\n"
        "report = memkern.report()\n"
        "assert report['selected']['cpu'] == 'reference'\n"
        "print(report['backends']['cpu']['reason'])\n"
    )
    result = python(code, folder=python_files(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "was not built; install a C++ compiler" in result.stdout
    assert result.stderr.count("cpu tensors run in plain PyTorch, which can be tens of times slower") == 1
    assert "the C++ extension was not built; install a C++ compiler" in result.stderr


@pytest.mark.full
def test_a_checkout_that_hides_a_compiled_install_says_so(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "memkern"
    installed.mkdir(parents=True)
    for name in ("__init__.py", "libmemkern.so"):
        (installed / name).touch()
    checkout = python_files(tmp_path / "checkout")
    code = (
        "import sys, types\n"
        "sys.meta_path.append(types.SimpleNamespace(find_module=lambda *_: None))  # as old ones are\n"
        "import memkern, torch\n"
        "for _ in range(2): memkern.quantize_blockwise(torch.ones(300))\n"
        "print(memkern.report()['backends']['cpu']['reason'])\n"
    )
    result = python(code, folder=checkout, PYTHONPATH=str(installed.parent))
    assert result.returncode == 0, result.stderr
    message = f"{checkout}/memkern has no compiled library and hides the memkern in {installed}, which has one; run"
    assert message in result.stdout
    assert result.stderr.count(message) == 1  # the warning, once


# ---- environment


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets MEMKERN_BACKEND, which a process otherwise reads once."""

    def set_variable(name: str) -> None:
        monkeypatch.setenv("MEMKERN_BACKEND", name)
        backend.from_environment.cache_clear()
        backend.warn_of_reference.cache_clear()

    yield set_variable
    monkeypatch.undo()
    backend.from_environment.cache_clear()


def test_memkern_backend_chooses_a_backend(ask_for: Callable[[str], None]) -> None:
    ask_for("reference")
    assert backend.select("cpu") == "reference"
    with TestCase().assertNoLogs("memkern"):  # plain PyTorch was asked for
        backend.warn_of_reference("cpu", None)
    if backend.available()["cpu"] is None:
        ask_for("cpu")
        assert backend.select("cpu") == "cpu"
        with memkern.use_backend("reference"):
            assert backend.select("cpu") == "reference"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [("tpu", ValueError, "backend must be one of"), ("cuda", RuntimeError, "is not available")],
)
def test_memkern_backend_with_an_absent_backend_is_an_error(
    ask_for: Callable[[str], None], name: str, error: type[Exception], message: str
) -> None:
    if backend.available().get(name, "") is None:
        pytest.skip(f"{name} runs here")
    ask_for(name)
    with pytest.raises(error, match=message):
        memkern.quantize_blockwise(torch.ones(300))
    assert message in memkern.report()["selected"]["cpu"]


@needs_cpp
@pytest.mark.parametrize("isa", ISAS)
def test_memkern_cpu_isa_chooses_an_instruction_set_that_runs(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = pytest.importorskip("memkern._host")
    best = host.cpu_isa()
    monkeypatch.setenv("MEMKERN_CPU_ISA", isa)
    assert host.cpu_isa() == (isa if isa in fast_here() else best)
    monkeypatch.setenv("MEMKERN_CPU_ISA", "no such thing")
    assert host.cpu_isa() == best


# ---- report


def test_report_is_json_and_complete() -> None:
    report = memkern.report()
    assert json.loads(json.dumps(report)) == report
    assert report["versions"]["memkern"] == memkern.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert {*report["backends"]} == {*backend.BACKENDS}
    for name, entry in report["backends"].items():
        assert entry["available"] == (entry["reason"] is None) == (backend.available()[name] is None)
    assert [None, *report["optimizers"]["master_weights"]] == [*optim.weights.MASTER_WEIGHTS]
    assert report["optimizers"]["state_bits"] == ["32", "8"]
    assert "reference" in report["optimizers"]["backends"]
    assert report["selected"]["cpu"] == backend.select("cpu")
    with memkern.use_backend("reference"):
        assert memkern.report()["selected"]["cpu"] == "reference"
    if fast_here():
        assert report["cpu"]["instruction_set"] in ISAS
        assert isinstance(report["cpu"]["features"], list)


def test_info_ends_quietly_where_nobody_reads_it() -> None:
    command = f"{sys.executable} -m memkern info | true"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "BrokenPipe" not in run.stderr


def test_info_prints_the_report_without_docstrings_and_optional_packages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(backend.report()))
    blocked = "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'transformers', 'numpy']))"
    run = python(f"{blocked}; from memkern.__main__ import main; main(['info'])", "-OO")
    shown = run.stdout
    assert run.returncode == 0, run.stderr
    assert torch.__version__ in shown
    for name, state in report["backends"].items():
        text = "yes" if state["available"] else f"no: {state['reason']}"
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE), name
