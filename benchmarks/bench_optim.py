"""Times steps of memkern's AdamW, Adam, Lion and SGD beside those of torch, bitsandbytes, torchao, flashoptim and
DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import memkern
from memkern.memory import optimizer_bytes, tensor_bytes

from .harness import Case, Contender, Subject

Shapes = Sequence[tuple[int, ...]]
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

UNUSED = {"DeepSpeed CPULion": "exp_avg_sq"}  # by contender: a state that it allocates and never reads or writes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the states, also of tensors inside of flashoptim's objects."""
    objects = [x for x in tree_leaves([*optimizer.state.values()]) if type(x).__module__.startswith("flashoptim")]
    return optimizer_bytes(optimizer) + sum(tensor_bytes(vars(x).values()) for x in objects)


def stepper(
    name: str,
    make: Make,
    shapes: Shapes,
    device: str,
    dtype: torch.dtype = torch.float32,
    reads: Callable[[int, int], int] = lambda params, state: 0,
    backend: str | None = None,
) -> Contender:
    """A contender that steps an optimizer over parameters of these shapes, their gradients constant.

    reads: bytes that a pass for norms reads before the update, given the bytes of all parameters and of the state.
    backend: memkern's, in place of the automatic choice.
    """

    def setup() -> Subject:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype) * 0.02) for s in shapes]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        optimizer = make(params)

        def moved_bytes() -> int:  # parameters and states are read and written, gradients are read
            unused = tensor_bytes(state.get(UNUSED.get(name)) for state in optimizer.state.values())
            size, state = tensor_bytes(params), state_bytes(optimizer) - unused
            return 3 * size + 2 * state + reads(size, state)

        def step() -> None:
            with memkern.use_backend(backend) if backend else contextlib.nullcontext():
                optimizer.step()

        return Subject(step, moved_bytes, lambda: state_bytes(optimizer))

    return Contender(name, setup)


def optimizer_of(module: str, cls: str, **options: Any) -> Make:
    """An optimizer class of a module that may not be installed."""
    return lambda params: getattr(importlib.import_module(module), cls)(params, **options)


def flash_adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """flashoptim's FlashAdamW with 8 more bits of each bf16 weight (24 in all), its default; fp32 weights take none."""
    bits = 24 if params[0].dtype == torch.bfloat16 else None
    return optimizer_of("flashoptim", "FlashAdamW", master_weight_bits=bits)(params)


ADAMW = {
    "memkern AdamW8bit": optimizer_of("memkern.optim", "AdamW8bit"),
    "memkern AdamW": optimizer_of("memkern.optim", "AdamW"),
    "torch AdamW fused": optimizer_of("torch.optim", "AdamW", fused=True),
    "torch AdamW foreach": optimizer_of("torch.optim", "AdamW", foreach=True),
    "bitsandbytes AdamW8bit": optimizer_of("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": optimizer_of("torchao.optim", "AdamW8bit"),
    "flashoptim AdamW": flash_adamw,
    "DeepSpeed CPUAdam": optimizer_of("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
}
ADAM = {
    "memkern Adam8bit": optimizer_of("memkern.optim", "Adam8bit"),
    "torch Adam fused": optimizer_of("torch.optim", "Adam", fused=True),
    "bitsandbytes Adam8bit": optimizer_of("bitsandbytes.optim", "Adam8bit"),
}
LION = {
    "memkern Lion8bit": optimizer_of("memkern.optim", "Lion8bit"),
    "memkern Lion": optimizer_of("memkern.optim", "Lion"),
    "bitsandbytes Lion8bit": optimizer_of("bitsandbytes.optim", "Lion8bit"),
    "DeepSpeed CPULion": optimizer_of("deepspeed.ops.lion", "DeepSpeedCPULion"),
}
SGD = {
    "memkern SGD8bit": optimizer_of("memkern.optim", "SGD8bit", momentum=0.9),
    "memkern SGD": optimizer_of("memkern.optim", "SGD", momentum=0.9),
    "torch SGD fused": optimizer_of("torch.optim", "SGD", momentum=0.9, fused=True),
    "torch SGD foreach": optimizer_of("torch.optim", "SGD", momentum=0.9, foreach=True),
    "bitsandbytes SGD8bit": optimizer_of("bitsandbytes.optim", "SGD8bit", lr=1e-3, momentum=0.9),
}


def clipped(make: Make) -> Make:
    """An optimizer with clip_grad_norm_ before each step: two passes over the gradients, norm and scaling."""

    def make_clipped(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(params)

        def clip(*_: object) -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return make_clipped


CLIPPED = {  # memkern's contender reads the gradients once more than a step without clipping (grad_norm_)
    "memkern AdamW8bit": optimizer_of("memkern.optim", "AdamW8bit", max_grad_norm=1.0),
    "torch AdamW fused": clipped(optimizer_of("torch.optim", "AdamW", fused=True)),
}


BF16_WEIGHTS = {
    "memkern AdamW8bit": optimizer_of("memkern.optim", "AdamW8bit"),
    "memkern AdamW8bit, stochastic rounding": optimizer_of("memkern.optim", "AdamW8bit", stochastic_rounding=True),
    "memkern AdamW8bit, bf16+8": optimizer_of("memkern.optim", "AdamW8bit", master_weights="bf16+8"),
    "memkern AdamW8bit, bf16+16": optimizer_of("memkern.optim", "AdamW8bit", master_weights="bf16+16"),
}

GPT2 = 124_439_808  # parameters


def gpt2_shapes(size: int) -> Shapes:
    """GPT-2's 148 tensors, with a width and a vocabulary for ``size`` parameters; 124,439,808 give GPT-2 itself."""
    width = math.sqrt(0.69 * size / 144)  # 69 % of GPT-2's parameters are in 12 blocks of 12 * width**2 each
    unit = 128 if width >= 128 else 16
    d = unit * max(1, int(width // unit))
    block = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    without_vocabulary = [(1024, d), (d,), (d,), *12 * block]  # positions, the last norm, blocks
    return [(max(1, size // d - sum(map(math.prod, without_vocabulary)) // d), d), *without_vocabulary]


def cases(size: int, device: str) -> list[Case]:
    single = [(max(1, size // 4096), 4096)]
    numel = math.prod(single[0])
    gpt2 = gpt2_shapes(GPT2 if device == "cuda" and size >= GPT2 else size)
    as_gpt2 = [(sum(map(math.prod, gpt2)) // 4096, 4096)]  # one tensor of GPT-2's size
    small = [(1000,)] * min(1000, size // 1000)

    def group(makes: dict[str, Make], shapes: Shapes, *leave_out: str, **options: Any) -> list[Contender]:
        unsupported = ("DeepSpeed",) if device == "cuda" else ("flashoptim",)  # packages that do not run on the device
        contenders = [
            stepper(name, make, shapes, device, **options)
            for name, make in makes.items()
            if not name.startswith((*unsupported, *leave_out))
        ]
        if device == "cuda":  # memkern's first contender on the Triton backend too
            name, make = next(iter(makes.items()))
            contenders.insert(1, stepper(f"{name}, Triton", make, shapes, device, backend="triton", **options))
        return contenders

    one_tensor = stepper("memkern AdamW8bit, one tensor", ADAMW["memkern AdamW8bit"], as_gpt2, device)
    # torchao compiles for every shape, 15 s each: it is compared on the one tensor only
    memkern_first, *others = group(ADAMW, gpt2, "torchao")
    return [
        Case("AdamW, one tensor", numel, group(ADAMW, single)),
        Case(
            f"AdamW, {len(gpt2)} tensors like GPT-2's",
            sum(map(math.prod, gpt2)),
            [memkern_first, one_tensor, *others],
        ),
        Case(f"AdamW, {len(small):,} tensors of 1,000", 1000 * len(small), group(ADAMW, small, "torchao")),
        Case("AdamW, one bf16 tensor", numel, group(ADAMW, single, "torchao", dtype=torch.bfloat16)),
        Case("AdamW8bit, one tensor of bf16 weights", numel, group(BF16_WEIGHTS, single, dtype=torch.bfloat16)),
        Case("AdamW clipped to a norm, one tensor", numel, group(CLIPPED, single)),
        Case("Adam, one tensor", numel, group(ADAM, single)),
        Case("Lion, one tensor", numel, group(LION, single)),
        Case("SGD with momentum, one tensor", numel, group(SGD, single)),
    ]
