"""Which implementation of the ops runs where.

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
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ._version import __version__

log = logging.getLogger("memkern")

BACKENDS = ("cpu", "cuda", "triton", "reference")
PREFERENCE = {
    "cpu": ("cpu", "reference"),
    "cuda": ("cuda", "triton", "reference"),  # ROCm's devices are called cuda as well
    "xpu": ("triton", "reference"),
}
OTHER_DEVICES = ("reference",)
LIBRARY = Path(__file__).with_name("libmemkern.so")

_asked_for: str | None = None


@functools.cache
def load_library() -> str | None:
    """Loads the C++ ops once. Returns None, or why they are not there."""
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
def _recall() -> Callable[[int], object] | None:
    if load_library():
        return None
    function = ctypes.PyDLL(str(LIBRARY)).memkern_recall
    function.argtypes = [ctypes.c_int64]
    function.restype = None
    return function


def recall(key: int) -> None:
    """Tells the C++ ops that a step of the optimizer ``key`` begins: they ask the caches for what its last one read."""
    if function := _recall():
        function(key)


def _missing_cuda() -> str | None:
    import torch

    from . import _ops  # noqa: F401  (defines the ops where C++ does not)

    if reason := load_library():
        return reason
    if not torch._C._dispatch_has_kernel_for_dispatch_key("memkern::adam_step_", "CUDA"):
        return (
            "the C++ extension was built without CUDA kernels; put nvcc (of the CUDA toolkit) on the PATH and "
            "reinstall memkern with MEMKERN_BUILD=cuda"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; nvidia-smi tells whether the driver does"
    return None


@functools.cache
def _missing(backend: str) -> str | None:
    if backend == "reference":
        return None
    if backend == "cpu":
        return load_library()
    if backend == "cuda":
        return _missing_cuda()
    # Only looked for: importing it takes a second.
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'memkern[triton]' (Linux)"
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
def _from_environment() -> str | None:
    name = os.environ.get("MEMKERN_BACKEND")
    return _check(name) if name else None


@functools.cache
def _automatic(device: str) -> str:
    wanted = PREFERENCE.get(device, OTHER_DEVICES)
    for name in wanted:
        reason = _missing(name)
        if reason is None:
            return name
        log.info("backend %r is not available for %s tensors: %s", name, device, reason)
    raise AssertionError("the reference is always available")


def select(device: str) -> str:
    """The backend for tensors of a device type (``"cpu"``, ``"cuda"``, ...).

    Raises:
        RuntimeError: the backend that was asked for cannot run on such tensors, with the reason and the cure.
    """
    name = _asked_for or _from_environment()
    if name is None:
        return _automatic(device)
    if (name == "cpu") != (device == "cpu") and name in ("cpu", "cuda"):
        raise RuntimeError(
            f"backend {name!r} was asked for and does not run on {device} tensors; "
            f"move the tensors, or ask for one of {', '.join(PREFERENCE.get(device, OTHER_DEVICES))}"
        )
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "backend 'triton' was asked for and does not run on cpu tensors; move the tensors, ask for one of "
            f"{', '.join(PREFERENCE['cpu'])}, or set TRITON_INTERPRET=1 to debug"
        )
    return name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every op inside the ``with`` block on one backend.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it is not available here; the message says why and what helps.
    """
    global _asked_for
    before, _asked_for = _asked_for, _check(name)
    try:
        yield
    finally:
        _asked_for = before


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


def report() -> dict[str, Any]:
    """Versions, backends with the reason for each missing one, CPU features, build facts: what a bug report needs."""
    import torch

    try:
        from . import _host
    except ImportError:
        _host = None
    cuda = torch.cuda.is_available()
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
        "selected": {device: _selected(device) for device in ["cpu", *(["cuda"] if cuda else [])]},
        "cpu": {
            "threads": torch.get_num_threads(),
            "instruction_set": _host.cpu_isa() if _host else None,
            "features": _host.cpu_features() if _host else None,
        },
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "build": {
            **(_host.build_info() if _host else {}),
            "library": str(LIBRARY) if LIBRARY.exists() else None,
        },
        "executable": sys.executable,
    }
