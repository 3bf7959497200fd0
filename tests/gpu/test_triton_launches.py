"""The Triton backend launches the right kernels, by Triton's own launcher and a driver that notes what is launched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memkern import backend
from tests.support.helpers import INTERPRETED

if INTERPRETED or (missing := backend.available()["triton"]):
    pytest.skip("in the interpreter" if INTERPRETED else str(missing), allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

import memkern.triton
from memkern.schemas import LION_STEP, StepArgs
from memkern.triton import adam, blockwise, codec, grad_norm, lars, launch_step, lion, squares, tensor_table
from memkern.triton.step_args import check_step
from memkern.triton.tensor_table import DeviceTable
from tests.support.graph_pool import check_pool
from tests.support.kernels.arguments import MIXED, step_args


class Place(NamedTuple):
    """Where a kernel was launched: the current device, the stream, and the device that it was loaded for."""

    device: int
    stream: int
    loaded_for: int


class NotingDriver:
    """Stands for the driver of two GPUs of compute capability 9.0, and notes every launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []  # (name, grid size, exit hook, the kernel's arguments...)
        self.places: list[Place] = []
        self.utils = self
        self.device = 0
        self.streams = {0: 100, 1: 200}  # the current ones

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:  # grid of three, stream, function, metadata, its copy, two hooks, arguments
            stream, (name, loaded_for) = args[3:5]
            assert name == metadata.name
            self.launched.append((name, args[0], *args[8:]))
            self.places.append(Place(self.device, stream, loaded_for))

        return launch

    def load_binary(self, name: str, _kernel: bytes, _shared: int, device: int) -> tuple[Any, ...]:
        assert device == self.device
        return name, (name, device), 32, 0, 1024

    def unload_module(self, *_: Any) -> None: ...

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.streams[device]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    noting = NotingDriver()
    monkeypatch.setattr(driver, "_active", noting)

    def forget() -> None:  # what was compiled with one driver is of no use with another
        tensor_table._plans.clear()
        for kernel in (k for module in (adam, blockwise, grad_norm, lars, lion) for k in vars(module).values()):
            if isinstance(kernel, jit.JITFunction):
                kernel.device_caches.clear()

    forget()
    yield noting
    forget()


def mixed_args(name: str) -> StepArgs:
    """The arguments of a step with five tensors of mixed dtypes."""
    return step_args(name, ["1-D", "odd", "long rows", "one long row", "short rows"], **MIXED)


@pytest.mark.parametrize(("tensors", "launches"), [(1, 2), (3, 3), (100, 3)])
def test_launches_do_not_grow_with_tensors(noted: NotingDriver, tensors: int, launches: int) -> None:
    memkern.triton.adam_step_(step_args("adam_step_", ["whole blocks"] * tensors, codec=(0, 0)))
    assert len(noted.launched) == launches
    assert [name for name, *_ in noted.launched] == ["adam_prologue", *["adam_tiles"] * (launches - 1)]


@pytest.mark.full
def test_later_steps_launch_the_same(noted: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    args = mixed_args("lion_step_")
    memkern.triton.lion_step_(args)
    first, noted.launched = noted.launched, []
    monkeypatch.setattr(jit.JITFunction, "run", None)  # Triton need not look for its kernels again
    args = args._replace(grads=[g.clone() for g in args.grads])
    args.lr[0].mul_(0.5)
    memkern.triton.lion_step_(args)
    assert len(first) > 2
    assert [[x for x in launch if not callable(x)] for launch in noted.launched] == [
        [x for x in launch if not callable(x)] for launch in first
    ]


class OnDevice0(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.get_device:
            return args[0].index
        return super().__torch_function__(function, types, args, kwargs or {})


class OnDevice1(OnDevice0):
    index = 1


def placed(args: StepArgs, cls: type[OnDevice0]) -> StepArgs:
    """The arguments with tensors that say they are on a GPU."""
    lists = "params", "grads", "moments", "scales", "steps", "trust_ratios"
    return args._replace(**{name: [x.as_subclass(cls) for x in getattr(args, name)] for name in lists})


@pytest.fixture
def two_devices(noted: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    """Two GPUs as the host's side knows them. The plans' tables are on the CPU."""

    @contextlib.contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        before, noted.device = noted.device, device.index
        yield
        noted.device = before

    def note(name: str) -> None:
        noted.launched.append((name,))

    on_cpu, table = torch.device("cpu"), tensor_table.DeviceTable
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda *_: SimpleNamespace(cuda_stream=noted.get_current_stream(noted.device)),
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tensor_table, "DeviceTable", lambda *sizes: table(*sizes[:-1], on_cpu))
    monkeypatch.setattr(tensor_table, "_spares", {})
    event = SimpleNamespace(record=partial(note, "record"), wait=partial(note, "wait"))
    monkeypatch.setattr(tensor_table, "event_of", lambda _: event)
    monkeypatch.setattr(launch_step, "dynamic_tables", lambda _: torch.zeros(1024))
    return noted


def lion_places(noted: NotingDriver, args: StepArgs) -> set[Place]:
    """The places of the launches of one step."""
    noted.places, noted.launched = [], []
    memkern.triton.lion_step_(args)
    return {*noted.places}


def tables_of(noted: NotingDriver) -> set[int]:
    """The addresses of the tables of tensors that the noted launches read."""
    return {launch[3].data_ptr() for launch in noted.launched if launch[0] not in ("record", "wait")}


def test_launches_are_of_the_tensors_device_and_its_stream(two_devices: NotingDriver) -> None:
    noted, args = two_devices, mixed_args("lion_step_")
    of_0, of_1 = placed(args, OnDevice0), placed(mixed_args("lion_step_"), OnDevice1)
    for device in (0, 1, 0):  # the current one
        noted.device = device
        assert lion_places(noted, of_0) == {Place(0, 100, 0)}
        assert lion_places(noted, of_1) == {Place(1, 200, 1)}
        assert noted.device == device
    tables = tables_of(noted)
    noted.streams[1] = 201
    assert lion_places(noted, of_1) == {Place(1, 201, 1)}
    # A stream's table may be read while another's is written.
    assert not tables & tables_of(noted)


def test_a_plans_step_waits_for_its_last_one(two_devices: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new stream may have the handle of a destroyed one, whose kernels may still read the plan's table."""
    noted, upload = two_devices, DeviceTable.upload

    def note_upload(memory: DeviceTable, *values: Any) -> None:
        noted.launched.append(("upload",))
        upload(memory, *values)

    def step(args: StepArgs) -> list[str]:
        lion_places(noted, args)
        return [name for name, *_ in noted.launched]

    monkeypatch.setattr(DeviceTable, "upload", note_upload)
    args = placed(step_args("lion_step_", ["1-D", "odd"]), OnDevice0)
    kernels = ["lion_prologue", "lion_tiles", "lion_tiles"]
    assert step(args) == ["upload", *kernels, "record"]
    other_grads = args._replace(grads=[g.clone().as_subclass(OnDevice0) for g in args.grads])
    assert step(other_grads) == ["wait", "upload", *kernels, "record"]


def test_a_cached_plan_is_of_gradients_on_its_device(two_devices: NotingDriver) -> None:
    args = placed(mixed_args("lion_step_"), OnDevice0)
    lion_places(two_devices, args)
    elsewhere = args._replace(grads=[args.grads[0], *(g.as_subclass(OnDevice1) for g in args.grads[1:])])
    with pytest.raises(ValueError, match=r"grads\[1\] must be on cuda:0 like the first parameter, got cuda:1"):
        memkern.triton.lion_step_(elsewhere)
    assert lion_places(two_devices, args) == {Place(0, 100, 0)}


def test_norm_is_checked_where_the_plan_is_cached(noted: NotingDriver) -> None:
    grads = [torch.ones(300)]
    memkern.triton.grad_norm_(torch.zeros((), dtype=torch.float64), grads)
    with pytest.raises(ValueError, match=r"norm must be float64 of one element, got torch.float32"):
        memkern.triton.grad_norm_(torch.zeros(()), grads)


# ---- memory pools of CUDA graphs


class PoolOfThisThread(TorchDispatchMode):
    """Notes the storages that this thread allocates, as if from a graph's pool while torch.compile warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in inputs:  # not a view
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result

    def live(self) -> set[int]:
        return {x.cdata for x in self.storages if not x.expired()}


@pytest.mark.full
@pytest.mark.parametrize("marked", [False, True])
def test_a_second_launch_finds_its_globals_unchanged(noted: NotingDriver, marked: bool) -> None:
    """Triton compares the globals that a kernel reads with those that it was compiled with; NaN is never the same."""
    x = torch.randn(64, 128)
    for _ in range(2):
        codes, scale = memkern.triton.quantize_blockwise(x, 0, True, 128, None, marked)
        memkern.triton.dequantize_blockwise(codes, scale, 0, 128, torch.float32)
    assert [name for name, *_ in noted.launched] == 2 * ["quantize_tiles", "dequantize_tiles"]


def test_checks_ask_a_device_for_no_value() -> None:
    """In a graph's capture the arguments of a new plan are checked, where nothing may wait for the device."""
    with FakeTensorMode():
        param, codes = (torch.empty(64, 128, dtype=t, device="cuda") for t in (torch.float32, torch.int8))
        step = torch.empty((), device="cuda")
        args = StepArgs(
            params=[param],
            grads=[torch.empty_like(param)],
            moments=[codes],
            scales=[step.new_empty(64, 1)],
            steps=[step],
            group=[0],
            lr=[step.double()],
            hyperparameters=[0.9, 0.99, 0.1, 0.0],
            codec=[0],
            block_size=[128],
        )
        check_step(LION_STEP, args, param.device)
        with pytest.raises(ValueError, match=r"steps\[0\] must be a finite number"):
            check_step(LION_STEP, args._replace(steps=[torch.tensor(-1.0)]), param.device)


@pytest.mark.full
def test_nothing_stays_in_a_graphs_pool(two_devices: NotingDriver, capability: dict[int, tuple[int, int]]) -> None:
    capability[0] = 9, 0
    args = placed(mixed_args("lars_step_"), OnDevice0)  # norms, ratios, then the update
    with PoolOfThisThread() as pool:
        memkern.triton.lars_step_(args)
    assert len(two_devices.launched) > 2
    two_devices.launched.clear()  # holds the kernels' arguments
    check_pool(pool.live)
    assert tensor_table._plans
    with pool:
        left = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"Detected 1 tensor\(s\) in the cudagraph pool"):
        check_pool(pool.live)
    assert len(left) == 3


def test_tables_of_the_dynamic_codec_are_made_in_another_thread(
    two_devices: NotingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    torch_tensor = torch.tensor

    def note_thread(*args: Any, device: torch.device, **options: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch_tensor(*args, **options)

    monkeypatch.setattr(torch, "tensor", note_thread)
    codec.dynamic_tables.cache_clear()
    codec.dynamic_tables(torch.device("cuda", 0))
    codec.dynamic_tables.cache_clear()
    assert threads
    assert threading.get_ident() not in threads


# ---- slow fp64

CAPABILITIES = {  # of compute, and whether fp64 is slow there
    **dict.fromkeys([(7, 0), (8, 0), (9, 0), (10, 0)], False),
    **dict.fromkeys([(7, 5), (8, 6), (8, 7), (8, 9), (10, 3), (12, 0), (12, 1)], True),
}


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[int, int]]]:
    """The compute capabilities of devices, by index."""
    capabilities: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.version, "hip", None)
    squares.slow_fp64.cache_clear()
    yield capabilities
    squares.slow_fp64.cache_clear()


def test_capabilities_with_slow_fp64(capability: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    capability |= dict(enumerate(CAPABILITIES))
    assert [squares.slow_fp64(torch.device("cuda", i)) for i in capability] == [*CAPABILITIES.values()]
    assert not squares.slow_fp64(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    squares.slow_fp64.cache_clear()
    assert not any(squares.slow_fp64(torch.device("cuda", i)) for i in capability)


@pytest.mark.full
def test_each_device_keeps_its_kernels(
    two_devices: NotingDriver,
    capability: dict[int, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability |= {0: (8, 9), 1: (9, 0)}
    args = [placed(step_args("lars_step_", ["whole blocks"]), cls) for cls in (OnDevice0, OnDevice1)]
    for _ in range(2):  # at the second step Triton is not asked for its kernels
        for device, slow in ((0, True), (1, False)):
            two_devices.launched = []
            memkern.triton.lars_step_(args[device])
            norms = [launch for launch in two_devices.launched if launch[0] == "lars_norm_tiles"]
            assert [launch[-1] for launch in norms] == [slow]
        monkeypatch.setattr(jit.JITFunction, "run", None)


def test_a_launch_keeps_a_kernel_for_each_constant() -> None:
    class Kernel(dict[Any, Any]):
        """Notes what is compiled, and what is launched of it."""

        def __missing__(self, grid: Any) -> Any:
            return self.compile

        def compile(self, *_: Any, slow: bool, **options: Any) -> Any:
            notes.append(("compiled", slow))
            return {(1, 1, 1): lambda *args: notes.append((slow, *args))}

    notes: list[Any] = []
    kernel, launch = Kernel(), tensor_table.Launch(1)
    for slow in (True, False, True, False):
        launch(kernel, 7, slow=slow)
    assert notes == [("compiled", True), ("compiled", False), (True, 7, True), (False, 7, False)]
