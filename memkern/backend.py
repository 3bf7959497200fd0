"""Chooses the backend (the implementation of the ops) for each device, and reports on all: ``memkern.report()``.

===============  ========================================================================
``cpu``          C++ for CPU tensors (AVX-512, AVX2 or plain C++, chosen at run time)
``cuda``         CUDA C++ for CUDA tensors
``triton``       Triton kernels
``reference``    plain PyTorch, for any device: the specification
===============  ========================================================================

CPU tensors take ``cpu``, else ``reference``; CUDA and ROCm tensors take ``cuda``, else ``triton``, else ``reference``;
XPU tensors take ``triton``, else ``reference``; others take ``reference``. ``MEMKERN_BACKEND=name`` or
``with memkern.use_backend("name"):`` asks for one; where that one is impossible, an error says why and what helps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .library import FILE as LIBRARY
from .library import NAMESPACE
from .techniques.options import MASTER_WEIGHTS

if TYPE_CHECKING:
    import torch

log = logging.getLogger("memkern")

BACKENDS = ("cpu", "cuda", "triton", "reference")
# The backends that tensors of a type of device may take, the first that can run there.
PREFERENCE = {
    "cpu": ("cpu", "reference"),
    "cuda": ("cuda", "triton", "reference"),  # ROCm's devices are called cuda as well
    "xpu": ("triton", "reference"),
}
OTHER_DEVICES = ("reference",)  # of all other types

_asked_for: str | None = None  # by the use_backend that was entered last and has not ended
_requests: dict[object, str] = {}  # of all that have not ended, in any thread


def shadowed() -> Path | None:
    """The compiled memkern that Python would import if this one, which is not compiled, did not come first.

    A checkout does: its directory is the first of ``sys.path`` where Python runs in it.
    """
    if LIBRARY.exists():
        return None
    specs = [PathFinder.find_spec("memkern", [entry]) for entry in sys.path]
    # Editable installs have finders of their own. Old finders have no find_spec; Python passes them by.
    specs += [finder.find_spec("memkern", None) for finder in sys.meta_path if hasattr(finder, "find_spec")]
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    return next((folder for folder in folders if (folder / LIBRARY.name).exists()), None)


@functools.cache
def load_library() -> str | None:
    """Loads the C++ ops once. Returns None, or why they are not there."""
    if hidden := shadowed():
        reason = (
            f"{LIBRARY.parent} has no compiled library and hides the memkern in {hidden}, which has one; run Python in "
            "another directory, or compile here: pip install --no-build-isolation -e ."
        )
        log.warning("backend 'cpu' is not available: %s", reason)
        return reason
    if not LIBRARY.exists():
        return (
            "the C++ extension was not built; install a C++ compiler and reinstall memkern, "
            "or see MEMKERN_BUILD in setup.py"
        )
    import torch

    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY} does not load ({error.__cause__ or error}); reinstall memkern against this torch"
    return None


@functools.cache
def _missing_cuda() -> str | None:
    """Why no CUDA kernel of memkern can run in this process, as far as one can tell without calling one."""
    import torch

    if reason := load_library():
        return reason
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::adam_step_", "CUDA"):
        return (
            "the C++ extension was built without CUDA kernels; put nvcc (of the CUDA toolkit) on the PATH and "
            "reinstall memkern with MEMKERN_BUILD=cuda"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; nvidia-smi tells whether the driver does"
    return None


def _watched() -> bool:
    """Whether a compiler traces or a dispatch mode is active, which would record a call as part of the program."""
    import torch

    return bool(
        torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() or torch._C._len_torch_dispatch_stack()
    )


_cuda_failures: dict[int, str | None] = {}  # by device; None where a call worked


def _cuda_failure(index: int) -> str | None:
    """Why the CUDA kernels do not run on a device, None where they do: found out by one small call, made once.

    Errors that another backend avoids, such as a kernel that was not compiled for the device, are raised by the launch
    itself. So the call is not synchronized: after a later error no backend can use the CUDA context.
    """
    import torch

    if index in _cuda_failures:
        return _cuda_failures[index]
    if _watched() or torch.cuda.is_current_stream_capturing():
        return None  # nothing may run here; the first call outside of it tells
    try:
        x = torch.ones(8, dtype=torch.float32, device=f"cuda:{index}")
        getattr(torch.ops, NAMESPACE).quantize_blockwise(x, 0, True, 8)
    except torch.OutOfMemoryError:
        return None  # says nothing of the kernels
    except RuntimeError as error:
        first_line = str(error).strip().partition("\n")[0]
        if "captur" in first_line:
            return None  # another stream's capture is in the way, which says nothing of the kernels either
        _cuda_failures[index] = (
            f"a CUDA kernel of memkern failed on cuda:{index}, {torch.cuda.get_device_name(index)}: {first_line}; "
            "reinstall memkern on this machine with MEMKERN_BUILD=cuda, against this torch"
        )
        log.warning("backend 'cuda' is not available: %s", _cuda_failures[index])
    else:
        _cuda_failures[index] = None
    return _cuda_failures[index]


def _missing(backend: str, index: int | None = None) -> str | None:
    """Why a backend cannot run (on the CUDA device ``index``, by default the current one); None where it can."""
    if backend == "reference":
        return None
    if backend == "cpu":
        return load_library()
    if backend == "cuda":
        if reason := _missing_cuda():
            return reason
        import torch

        return _cuda_failure(torch.cuda.current_device() if index is None else index)
    # Not imported: that takes a second.
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; the extra memkern[triton] brings it (Linux)"
    return None


def available() -> dict[str, str | None]:
    """Each backend, with None where it can run and the reason where it cannot."""
    return {name: _missing(name) for name in BACKENDS}


def _check(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    reason = _missing(name)
    if reason:
        raise RuntimeError(f"backend {name!r} is not available: {reason}")
    return name


@functools.cache
def from_environment() -> str | None:
    """The backend of MEMKERN_BACKEND. Raises ValueError for none of BACKENDS, RuntimeError for one that is absent."""
    name = os.environ.get("MEMKERN_BACKEND")
    return _check(name) if name else None


_chosen: dict[str | torch.device, str] = {}  # by device or type of device, where nobody asked for one


@functools.cache  # once
def warn_of_reference(kind: str, asked_for: str | None) -> None:
    """Says that plain PyTorch runs where nobody has asked for it and there are kernels for the type of device."""
    if asked_for or from_environment() or kind not in PREFERENCE or shadowed():  # load_library warns of the last
        return
    log.warning(
        "%s tensors run in plain PyTorch, which can be tens of times slower than compiled kernels: %s "
        "(MEMKERN_BACKEND=reference chooses it, without this warning)",
        kind,
        _missing(PREFERENCE[kind][0]),
    )


def _automatic(device: str | torch.device) -> str:
    """The first backend that can run on a device, where nobody asked for one."""
    if name := _chosen.get(device):
        return name
    kind, _, number = str(device).partition(":")
    index = int(number) if number else None
    for name in PREFERENCE.get(kind, OTHER_DEVICES):
        reason = _missing(name, index)
        if reason is None:
            # Remembered if certain: not before the CUDA call, and not without an index (the current device may change).
            if kind != "cuda" or _missing_cuda() or index in _cuda_failures:
                _chosen[device] = name
            return name
        log.info("backend %r is not available for %s tensors: %s", name, device, reason)
    raise AssertionError("the reference is always available")


def select(device: str | torch.device) -> str:
    """The backend for tensors of a device (``torch.device("cuda", 1)``) or device type (``"cpu"``, ``"cuda"``, ...).

    Raises:
        RuntimeError: the backend that was requested cannot run on such tensors, with the reason and the cure.
    """
    name = _asked_for or from_environment()
    if name is None:
        return _automatic(device)
    kind = device if isinstance(device, str) else device.type
    if (name == "cpu") != (kind == "cpu") and name in ("cpu", "cuda"):
        raise RuntimeError(
            f"backend {name!r} was requested and does not run on {kind} tensors; "
            f"move the tensors, or ask for one of {', '.join(PREFERENCE.get(kind, OTHER_DEVICES))}"
        )
    if name == "triton" and kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "backend 'triton' was requested and does not run on cpu tensors; move the tensors, ask for one of "
            f"{', '.join(PREFERENCE['cpu'])}, or set TRITON_INTERPRET=1 to debug"
        )
    return name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every op inside the ``with`` block on one backend, those of other threads too.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it is not available here; the message says why and what helps.
    """
    global _asked_for
    request = object()
    _asked_for = _requests[request] = _check(name)
    try:
        yield
    finally:  # others may have begun in between, and not ended
        del _requests[request]
        _asked_for = [None, *_requests.values()][-1]


def _selected(device: str) -> str:
    try:
        return select(device)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distributed() -> dict[str, Any]:
    """The process group, and parameters whose shards end inside blocks; nothing before memkern.optim is imported."""
    shards = sys.modules.get(f"{__package__}.optim.dtensor.shards")
    return shards.report() if shards else {"process_group": None, "shards_end_inside_blocks": []}


def _optimizers() -> dict[str, Any]:
    """How the optimizers can store moments and bf16 weights; every backend's kernels have all of it."""
    return {
        "state_bits": ["32", "8"],
        "master_weights": [name for name in MASTER_WEIGHTS if name is not None],
        "stochastic_rounding": True,
        "weights_in": "bfloat16",
        "backends": [name for name, reason in available().items() if reason is None],
        "reference_alone": ["float64", "amsgrad"],
    }


def report() -> dict[str, Any]:
    """Versions, backends with the reason for each missing one, what optimizers store, CPU features, build facts: what
    a bug report needs."""
    import torch

    try:
        from . import _host
    except ImportError:
        _host = None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "versions": {
            "memkern": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "backends": {n: {"available": reason is None, "reason": reason} for n, reason in available().items()},
        "selected": {device: _selected(device) for device in ["cpu", *(["cuda"] if count else [])]},
        "optimizers": _optimizers(),
        "cpu": {
            "threads": torch.get_num_threads(),
            "instruction_set": _host.cpu_isa() if _host else None,
            "features": _host.cpu_features() if _host else None,
        },
        "devices": {
            f"cuda:{i}": {"name": torch.cuda.get_device_name(i), "cuda_kernels": _missing("cuda", i) or "run"}
            for i in range(count)
        },
        "distributed": _distributed(),
        "build": {
            **(_host.build_info() if _host else {}),
            "library": str(LIBRARY) if LIBRARY.exists() else None,
        },
        "executable": sys.executable,
    }
