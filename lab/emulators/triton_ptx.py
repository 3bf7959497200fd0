"""Runs Triton's kernels as compiled for NVIDIA GPUs in the PTX emulator, on CPU tensors, launched by memkern.triton."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lab.emulators.ptx_emulator import Memory, Module, launch, pack

if TYPE_CHECKING:
    from lab.emulators.triton_checks import Watch

ARCHITECTURE = 90
POINTERS = {  # Triton's types
    **{torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"},
    **{torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8"},
}


def missing() -> str | None:
    """Why Triton does not compile here, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """A kernel as Triton's launcher would compile it for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        x = arguments[param.name]
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", x
            continue
        if isinstance(x, torch.Tensor):
            signature[param.name] = POINTERS[x.dtype]
            number = x.data_ptr()
        else:
            signature[param.name] = "i32" if -(2**31) <= x < 2**31 else "i64"
            number = x
        if isinstance(x, int) and x == 1 and not param.do_not_specialize:
            signature[param.name], constants[(i,)] = "constexpr", 1
        elif number % 16 == 0 and not (param.do_not_specialize or param.do_not_specialize_on_alignment):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options)


@contextlib.contextmanager
def emulated(watch: Watch | None = None) -> Iterator[list[Module]]:
    """Inside the ``with`` block Triton kernels run in the emulator; yields the list of the modules launched.

    ``watch``: limits their memory, checks their accesses, and may change their PTX.
    """
    from triton.runtime.jit import JITFunction

    launched: list[Module] = []
    cache: dict[Any, tuple[Module, Any]] = {}

    def run(self: Any, *args: Any, grid: tuple[int], warmup: bool, **kwargs: Any) -> None:
        names = {p.name for p in self.params}
        options = {k: v for k, v in kwargs.items() if k not in names}
        arguments = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        binary = compiled(self, arguments, options)
        if binary.hash not in cache:
            text = binary.asm["ptx"]
            cache[binary.hash] = Module(watch.edited(binary.name, text) if watch else text), binary.metadata
        module, metadata = cache[binary.hash]
        kernel = module.find(metadata.name)
        launched.append(module)
        params = pack(kernel, *(arguments[p.name] for p in self.params if not p.is_constexpr))
        threads = 32 * metadata.num_warps
        if watch is None:
            launch(module, kernel, grid[0], threads, params, Memory.process(), metadata.shared)
        elif not watch.leaves_out(metadata.name):
            memory = watch.memory(arguments)
            launch(module, kernel, grid[0], threads, params, memory, metadata.shared, watch.checks)

    original_run = JITFunction.run
    JITFunction.run = run
    try:
        yield launched
    finally:
        JITFunction.run = original_run
