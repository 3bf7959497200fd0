"""For all tests: backends, layouts, values that are hard to quantize, comparison in every bit, optimizers' steps."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import memkern
from memkern import backend as backends
from memkern.compiled import inductor
from memkern.planner import fake_cuda
from tests.support.optimizers import EIGHT_BIT, LAYERWISE, OPTIMIZERS

ON_ARM = platform.machine() in ("aarch64", "arm64")
ISAS = ("generic", "neon") if ON_ARM else ("generic", "avx2", "avx512")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU (test_triton.py)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODECS = ("power", "dynamic")

needs_fake_cuda = pytest.mark.skipif(
    fake_cuda.why_not() is not None, reason="fake CUDA is for a torch built without GPUs, with a C++ compiler"
)


def skip_unless_torch_compiles() -> None:
    """Skips a test where torch is older than what memkern.compile needs."""
    if TorchVersion(torch.__version__) < inductor.FIRST_VERSION:
        pytest.skip(f"memkern.compile needs torch {inductor.FIRST_VERSION} or later")


def why_not(backend: str) -> str | None:
    """None where the tests can run on a backend or an instruction set of the CPU's, else the reason."""
    if backend not in ISAS:
        reason = backends.available()[backend]
        no_gpu = device_of(backend) == "cuda" and not torch.cuda.is_available()
        return reason or ("torch sees no CUDA device" if no_gpu else None)
    if reason := backends.available()["cpu"]:
        return reason
    try:
        from memkern import _host
    except ImportError:
        return "memkern._host is not built, so that nothing tells the instruction set"
    with _environment("MEMKERN_CPU_ISA", backend):
        isa = _host.cpu_isa()
    return None if isa == backend else f"this processor has no {backend}: {isa} would run"


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values for ``parametrize``, of which `make test` runs the first few and `make test-all` the others too."""
    return _from(quick, pytest.mark.full, values)


def first_full(values: Iterable[Any], full: int = 1) -> list[Any]:
    """Values for ``parametrize`` of a full test, of which `make test-long` runs all but the first few."""
    return _from(full, pytest.mark.long, values)


def _from(first: int, mark: pytest.MarkDecorator, values: Iterable[Any]) -> list[Any]:
    return [
        value if i < first else pytest.param(*(value if type(value) is tuple else (value,)), marks=mark)
        for i, value in enumerate(values)
    ]


def param(backend: str, quick: tuple[str, ...] = ISAS[:1]) -> Any:
    """A backend or an instruction set, with its marks. `make test` takes ``quick`` and the best set that runs here."""
    marks = marks_of(backend)
    if backend in ISAS[:-1] and backend not in quick and why_not(ISAS[-1]) is None:
        marks.append(pytest.mark.full)
    return pytest.param(backend, marks=marks)


def marks_of(backend: str) -> list[pytest.MarkDecorator]:
    """The pytest marks of a test on a backend or on an instruction set."""
    reason = why_not(backend)
    marks = [pytest.mark.skipif(reason is not None, reason=str(reason))]
    return [*marks, pytest.mark.gpu] if device_of(backend) == "cuda" else marks


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" or (backend == "triton" and not INTERPRETED) else "cpu"


def slow_fp64(backend: str) -> bool:
    """Whether a backend is on a GPU whose sums of squares are within 2e-7, and norms within 1e-7."""
    if device_of(backend) != "cuda":
        return False
    from memkern.triton import squares

    return squares.slow_fp64(torch.device("cuda", torch.cuda.current_device()))


def skip_other_norms(backend: str) -> None:
    """Skips a test that compares bits of LAMB or LARS, which follow from norms, where a GPU's norms are others."""
    if slow_fp64(backend):
        pytest.skip("norms of this GPU have other last bits than the reference's")


GPU = ("cuda", "triton")
over_fast = pytest.mark.parametrize("backend", [param(name) for name in (*ISAS, *GPU)])
"""The backends that are compared with the reference."""
over_all = pytest.mark.parametrize("backend", [param(name) for name in ("reference", *ISAS, *GPU)])
over_gpu = pytest.mark.parametrize("backend", [param(name) for name in GPU])
over_cpu = pytest.mark.parametrize("backend", [param(name, quick=()) for name in ("reference", *ISAS)])
over_codecs = pytest.mark.parametrize("codec", CODECS)
over_signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
needs_cpp = pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))
# torch fuses a multiplication with lerp's and add's addition only in its kernels for AVX2 and more.
needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's CPU kernels without AVX2 are not fused",
)


def name_of(x: Any) -> str | None:
    """The id of a parameter that is a dtype or a class."""
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else getattr(x, "__name__", None)


over_dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def fast_here() -> list[str]:
    """The instruction sets that run on this machine's CPU."""
    return [name for name in ISAS if why_not(name) is None]


@contextlib.contextmanager
def on(backend: str) -> Iterator[None]:
    """Runs every op on one backend; an instruction set is the "cpu" backend with that set."""
    if backend in ISAS:
        with _environment("MEMKERN_CPU_ISA", backend), memkern.use_backend("cpu"):
            yield
    else:
        with memkern.use_backend(backend):
            yield


# ---- tensors

LAYOUTS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "0-dim": lambda new: new(),
    "one element": lambda new: new(1),
    "empty": lambda new: new(0),
    "empty rows": lambda new: new(3, 0),
    "1-D": lambda new: new(1001),
    "odd": lambda new: new(37, 53),
    "long rows": lambda new: new(3, 1000),
    "one long row": lambda new: new(1, 1500),
    "short rows": lambda new: new(150, 7),
    "rows of one": lambda new: new(261, 1),
    "whole blocks": lambda new: new(6, 128),
    "channels_last": lambda new: new(4, 9, 5, 3).contiguous(memory_format=torch.channels_last),
    "transposed": lambda new: new(131, 33).t(),
    "permuted": lambda new: new(5, 7, 60).permute(1, 2, 0),
    "unaligned": lambda new: new(33 * 131 + 1)[1:].view(33, 131),
}
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def hard(shape: Any, seed: int, scale: float = 1e-3, signed: bool = True) -> Tensor:
    """fp32 values of many magnitudes, with zeros, a run of zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * (2 * torch.randn(shape, generator=generator)).exp() * scale
    x[torch.rand(shape, generator=generator) < 0.05] = 0
    flat = x.view(-1)
    flat[200:460] = 0
    flat[480:484] *= 1e-37
    return x if signed else x.abs()


def tensor(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Tensor:
    """Hard values in one of the layouts."""
    return LAYOUTS[layout](lambda *shape: hard(shape, seed, **options).to(dtype))


def like(p: Tensor, seed: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Hard values with the shape and strides of another tensor."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(hard(p.shape, seed, **options))


def at(x: Tensor, backend: str) -> Tensor:
    """A copy on the device of a backend, laid out as x is and at the same offset into its storage."""
    offset = x.storage_offset()
    storage = torch.empty(offset + x.numel(), dtype=x.dtype, device=device_of(backend))
    return storage.as_strided(x.shape, x.stride(), offset).copy_(x)


def set_grad(p: Tensor, g: Tensor) -> None:
    """p.grad = g, also where their dtypes differ."""
    p.grad = None
    if hasattr(p, "grad_dtype"):
        p.grad_dtype = g.dtype
    elif g.dtype != p.dtype:
        pytest.skip(f"torch {torch.__version__} has no gradients of another dtype")
    p.grad = g


class Calls(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# ---- comparison

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(actual: Any, expected: Any, what: str = "result") -> None:
    """Equal in every bit (any NaN equals any other), dtype, shape and strides; through lists and dicts."""
    if isinstance(expected, dict):
        assert [*actual] == [*expected], f"{what}: keys {[*actual]}, expected {[*expected]}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{what}: {len(actual)} entries, expected {len(expected)}"
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{what}[{i}]")
    elif isinstance(expected, Tensor):
        a, b = actual.detach().cpu(), expected.detach().cpu()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        assert a.stride() == b.stride() or a.numel() <= 1 or 1 in a.shape, (
            f"{what}: strides {a.stride()}, not {b.stride()}"
        )
        wrong = a.contiguous().view(_BITS[a.element_size()]) != b.contiguous().view(_BITS[b.element_size()])
        if a.dtype.is_floating_point:
            wrong &= ~(a.isnan() & b.isnan())
        if wrong.any():
            i = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, the first at {i}: "
                f"{a[i].item()!r}, expected {b[i].item()!r}"
            )
    else:
        assert actual == expected, f"{what}: {actual!r}, expected {expected!r}"


# ---- optimizers

over_optimizers = pytest.mark.parametrize("build", OPTIMIZERS, ids=name_of)
_KINDS = [cls for cls in OPTIMIZERS if cls.__name__ in ("AdamW8bit", "LAMB8bit", "SGD")]
over_kinds = pytest.mark.parametrize("build", _KINDS, ids=name_of)
"""A class of each kind, for what all share: two moments, trust ratios, one moment; states of 8 bits and of 32."""
over_layerwise = pytest.mark.parametrize("build", LAYERWISE, ids=name_of)
over_8bit = pytest.mark.parametrize("build", EIGHT_BIT, ids=name_of)
# A matrix of 8-bit states by default; a small one and a bias, which have fp32 states.
SHAPES = [(64, 128), (10, 10), (300,)]


def first_moment(optimizer: Any, p: Tensor) -> Tensor:
    """A parameter's first moment: exp_avg, or momentum_buffer."""
    return optimizer.state[p][next(iter(optimizer.moments))]


def make_params(shapes: Any = SHAPES, seed: int = 0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(hard(shape, seed + i, scale=0.1)) for i, shape in enumerate(shapes)]


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = like(p, 1000 * seed + i)


def train(optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> dict[str, Any]:
    """A snapshot after steps with the gradients of ``give_gradients``, whose seeds begin with ``first``."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()
    return snapshot(optimizer)


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of everything that a step may change: parameters and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "params": [p.detach().clone() for p in params],
        "states": [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params],
    }
