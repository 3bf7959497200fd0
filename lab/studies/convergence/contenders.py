"""Lists the optimizers and other techniques that are compared, each with the 32-bit original that it replaces."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support import timm_factory

from .tasks import Task

Make = Callable[[nn.Module, float, Task], Any]
"""Makes an optimizer from a model, a learning rate and a task."""
BF16 = torch.bfloat16


class Contender(NamedTuple):
    name: str
    package: str  # the package's name on PyPI, whose version is recorded
    family: str  # one of tasks.FAMILIES; a task has a grid of learning rates for each
    make: Make
    original: str  # the name of the 32-bit contender that this contender is compared with
    weights: torch.dtype | None = None  # the dtype of stored weights; None for the task's
    compress: dict[str, Any] | None = None  # options of memkern.compress; None where it is not called
    only: tuple[str, ...] = ()  # names of the tasks in which the contender runs; empty for all
    note: str = ""  # a remark for the table

    def reason_against(self, task: Task, model: nn.Module) -> str:
        """Why the contender has no run in this task; "" where it has."""
        families = getattr(task, "families", None)
        if families and (self.family not in families or self.compress is not None or self.weights == BF16):
            return "large batches compare AdamW, SGD, LAMB and LARS"
        if self.only and task.name not in self.only:
            return f"only in {', '.join(self.only)}"
        if self.family == "muon" and not matrices(model):
            return "the model has no matrix for Muon: embeddings, heads and convolutions stay with AdamW"
        return ""


def matrices(model: nn.Module) -> list[Any]:
    """The parameters that Muon steps."""
    from memkern.optim import muon_groups

    return [p for group in muon_groups(model) if group["algorithm"] == "muon" for p in group["params"]]


def maker(module: str, cls: str, decay: float | None = None, **options: Any) -> Make:
    """A function that makes an optimizer of a class, whose package may be absent. Biases and norms are not decayed.

    decay: the weight decay, in place of the task's.
    """

    def make(model: nn.Module, lr: float, task: Task) -> Any:
        from memkern.optim import param_groups

        of_timm = module == "timm"
        optimizer_class = timm_factory.optimizer(cls) if of_timm else getattr(importlib.import_module(module), cls)
        groups = param_groups(model, weight_decay=task.weight_decay if decay is None else decay)
        if not module.startswith("memkern"):  # some peers refuse or misread keys that they do not know
            groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
        with contextlib.redirect_stdout(io.StringIO()):
            return optimizer_class(groups, lr=lr, **options)

    return make


ADAMW_LR = 3e-3  # the learning rate of parameters that Muon leaves to AdamW


class TorchMuon:
    """torch.optim.Muon for the matrices and torch.optim.AdamW for the others."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        groups = _groups(model, lr)
        by_algorithm = {name: [g for g in groups if g["algorithm"] == name] for name in ("muon", "adamw")}
        self.inner = [
            torch.optim.Muon([p for g in by_algorithm["muon"] for p in g["params"]], lr=lr, weight_decay=0.1),
            torch.optim.AdamW([{k: v for k, v in g.items() if k != "algorithm"} for g in by_algorithm["adamw"]]),
        ]
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()


def _groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    from memkern.optim import muon_groups

    return [*muon_groups(model, lr=lr, adamw_lr=ADAMW_LR)]


def _muon(model: nn.Module, lr: float, **options: Any) -> Any:
    from memkern.optim import Muon8bit

    return Muon8bit(_groups(model, lr), **options)


def torch_muon(model: nn.Module, lr: float, task: Task) -> Any:
    return TorchMuon(model, lr)


def muon8bit(model: nn.Module, lr: float, task: Task) -> Any:
    return _muon(model, lr)


def normuon(model: nn.Module, lr: float, task: Task) -> Any:
    """pytorch_optimizer's NorMuon, with the groups, weight decay and AdamW options that TorchMuon has."""
    from pytorch_optimizer import NorMuon

    groups = [
        {**{k: v for k, v in g.items() if k != "algorithm"}, "use_muon": g["algorithm"] == "muon"}
        for g in _groups(model, lr)
    ]
    for group in groups:
        group.update({"weight_decay": 0.1} if group["use_muon"] else {"betas": (0.9, 0.999)})
    return NorMuon(groups, lr=lr)


ONE_MODULE = ("gefen", "gefen-x")  # packages with the same module name, so that only one can be installed


def gefen(package: str, **options: Any) -> Make:
    """The class Gefen of the module gefen, if ``package`` is the one that is installed."""

    def make(model: nn.Module, lr: float, task: Task) -> Any:
        importlib.metadata.version(package)  # raises if it is not installed
        return maker("gefen", "Gefen", **options)(model, lr, task)

    return make


def ademamix(module: str, cls: str) -> Make:
    """AdEMAMix with the warm-ups of alpha and beta3 over the whole run, as its paper has them."""

    def make(model: nn.Module, lr: float, task: Task) -> Any:
        return maker(module, cls, t_alpha=task.steps, t_beta3=task.steps)(model, lr, task)

    return make


def without_compiling(make: Make) -> Make:
    """Runs torchao's step uncompiled: it would compile for each shape, in 10 to 90 s on a CPU."""

    def uncompiled(model: nn.Module, lr: float, task: Task) -> Any:
        optimizer = make(model, lr, task)
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
        return optimizer

    return uncompiled


ADAMW = functools.partial(maker, "memkern.optim", "AdamW8bit")
TORCH_ADAMW = maker("torch.optim", "AdamW", fused=True)
LARS = {"momentum": 0.9, "trust_coeff": 1e-3, "decay": 1e-4}
SGD = {"momentum": 0.9, "decay": 1e-4}
LAMB = {"decay": 0.01}
A = "torch AdamW"  # original of the contenders of AdamW
EAGER = "without torch.compile"

ALL = (
    Contender(A, "torch", "adamw", TORCH_ADAMW, A, torch.float32),
    Contender(f"{A}, bf16 weights", "torch", "adamw", TORCH_ADAMW, A, BF16, only=("fine-tune",)),
    Contender("memkern AdamW", "memkern", "adamw", maker("memkern.optim", "AdamW"), A),
    Contender("memkern AdamW8bit", "memkern", "adamw", ADAMW(), A),
    Contender("memkern AdamW8bit bf16+8", "memkern", "adamw", ADAMW(master_weights="bf16+8"), A, BF16),
    Contender(
        "memkern AdamW8bit stochastic", "memkern", "adamw", ADAMW(stochastic_rounding=True), A, BF16,
        note="bf16 weights, stochastic rounding",
    ),
    Contender("memkern 3-bit activations", "memkern", "adamw", TORCH_ADAMW, A, torch.float32, {}),
    Contender(
        "memkern linear=0.2", "memkern", "adamw", TORCH_ADAMW, A, torch.float32,
        {"activations": None, "linear": 0.2}, only=("gpt", "fine-tune"),
    ),
    Contender(
        "memkern linear=0.1", "memkern", "adamw", TORCH_ADAMW, A, torch.float32,
        {"activations": None, "linear": 0.1}, only=("gpt", "fine-tune"),
    ),
    Contender("bitsandbytes AdamW8bit", "bitsandbytes", "adamw", maker("bitsandbytes.optim", "AdamW8bit"), A),
    Contender(
        "torchao AdamW8bit", "torchao", "adamw", without_compiling(maker("torchao.optim", "AdamW8bit")), A,
        note=EAGER,
    ),
    Contender(
        "torchao AdamW8bit stochastic", "torchao", "adamw",
        without_compiling(maker("torchao.optim", "AdamW8bit", bf16_stochastic_round=True)), A, BF16,
        only=("fine-tune",), note=f"bf16 weights, stochastic rounding; {EAGER}",
    ),
    Contender(
        "torchao AdamW4bit", "torchao", "adamw", without_compiling(maker("torchao.optim", "AdamW4bit")), A,
        note=EAGER,
    ),
    Contender(
        "torchao AdamWFp8", "torchao", "adamw", without_compiling(maker("torchao.optim", "AdamWFp8")), A,
        note=EAGER,
    ),
    Contender("flashoptim FlashAdamW", "flashoptim", "adamw", maker("flashoptim", "FlashAdamW"), A),
    Contender(
        "pytorch_optimizer FlashAdamW", "pytorch_optimizer", "adamw",
        maker("pytorch_optimizer", "FlashAdamW", decouple_lr=False), A, note="flashoptim's codes in plain PyTorch",
    ),
    Contender(
        "pytorch_optimizer AdEMAMix", "pytorch_optimizer", "adamw", ademamix("pytorch_optimizer", "AdEMAMix"),
        "pytorch_optimizer AdEMAMix", torch.float32,
    ),
    Contender(
        "bitsandbytes AdEMAMix", "bitsandbytes", "adamw", ademamix("bitsandbytes.optim", "AdEMAMix32bit"),
        "pytorch_optimizer AdEMAMix", torch.float32,
    ),
    Contender(
        "bitsandbytes AdEMAMix8bit", "bitsandbytes", "adamw", ademamix("bitsandbytes.optim", "AdEMAMix8bit"),
        "pytorch_optimizer AdEMAMix",
    ),
    Contender("memkern Lion", "memkern", "lion", maker("memkern.optim", "Lion"), "memkern Lion", torch.float32),
    Contender("memkern Lion8bit", "memkern", "lion", maker("memkern.optim", "Lion8bit"), "memkern Lion"),
    Contender(
        "bitsandbytes Lion8bit", "bitsandbytes", "lion", maker("bitsandbytes.optim", "Lion8bit"), "memkern Lion"
    ),
    Contender(
        "torch SGD", "torch", "sgd", maker("torch.optim", "SGD", fused=True, **SGD), "torch SGD", torch.float32
    ),
    Contender("memkern SGD8bit", "memkern", "sgd", maker("memkern.optim", "SGD8bit", **SGD), "torch SGD"),
    Contender(
        "bitsandbytes SGD8bit", "bitsandbytes", "sgd", maker("bitsandbytes.optim", "SGD8bit", **SGD), "torch SGD"
    ),
    Contender("torch Muon", "torch", "muon", torch_muon, "torch Muon", torch.float32),
    Contender("memkern Muon8bit", "memkern", "muon", muon8bit, "torch Muon"),
    Contender("pytorch_optimizer NorMuon", "pytorch_optimizer", "muon", normuon, "torch Muon", torch.float32),
    Contender(
        "timm Lamb", "timm", "lamb", maker("timm", "Lamb", max_grad_norm=None, **LAMB), "timm Lamb", torch.float32
    ),
    Contender("memkern LAMB", "memkern", "lamb", maker("memkern.optim", "LAMB", **LAMB), "timm Lamb"),
    Contender("memkern LAMB8bit", "memkern", "lamb", maker("memkern.optim", "LAMB8bit", **LAMB), "timm Lamb"),
    Contender(
        "bitsandbytes LAMB8bit", "bitsandbytes", "lamb", maker("bitsandbytes.optim", "LAMB8bit", **LAMB), "timm Lamb"
    ),
    Contender("timm Lars", "timm", "lars", maker("timm", "Lars", **LARS), "timm Lars", torch.float32),
    Contender("memkern LARS", "memkern", "lars", maker("memkern.optim", "LARS", **LARS), "timm Lars"),
    Contender("memkern LARS8bit", "memkern", "lars", maker("memkern.optim", "LARS8bit", **LARS), "timm Lars"),
    Contender("Gefen", "gefen", "adamw", gefen("gefen"), A),  # last: its first step takes long
    Contender(
        "Gefen-X", "gefen-x", "adamw", gefen("gefen-x", fused=False), A,
        note="fused=False: its kernels are CUDA's",
    ),
)  # fmt: skip
CONTENDERS = {contender.name: contender for contender in ALL}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
