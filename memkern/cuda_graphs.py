"""A module whose forward and backward pass are captured in CUDA graphs, saved-tensor hooks and all."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .functions.autograd import autocast_dtype
from .saved.hooks import OFFLOAD

DEVICE = "cuda"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Types of arguments and results that are part of the captured work."""


class _Sample(NamedTuple):
    """What a call must have in common with the one that was captured."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Of a tensor its shape, dtype, device and requires_grad; else the value."""
    autocast: torch.dtype | None
    grad_enabled: bool


class _Weight(NamedTuple):
    """A parameter or buffer as it was captured."""

    name: str
    owner: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    address: int
    requires_grad: bool

    def is_as_captured(self) -> bool:
        x = self.owner.get(self.key)
        return x is self.tensor and x.data_ptr() == self.address and x.requires_grad == self.requires_grad


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Sample, list[Any]]:
    """Of a call, and the leaves of its arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    return _Sample(spec, tuple(map(_described, leaves)), autocast_dtype(DEVICE), torch.is_grad_enabled()), leaves


def _tensors(leaves: list[Any]) -> tuple[Tensor, ...]:
    return tuple(x for x in leaves if isinstance(x, Tensor))


def _weights(module: nn.Module) -> list[_Weight]:
    found = []
    for prefix, each in module.named_modules():
        for owner in (each._parameters, each._buffers):
            for key, x in owner.items():
                if x is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.append(_Weight(name, owner, key, x, x.data_ptr(), x.requires_grad))
    return found


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, DistributedDataParallel):
        raise ValueError("module must be what DistributedDataParallel wraps: capture it first, then wrap the result")
    for name, each in module.named_modules():
        if OFFLOAD in vars(each):
            raise ValueError(
                f"module must not offload what it saves, got {name or 'a module'} compressed with offload=True: its "
                "copies wait for events, which cannot be asked about during a capture"
            )
    for weight in _weights(module):
        if type(weight.tensor) not in (nn.Parameter, nn.Buffer, Tensor) or weight.tensor.device.type != DEVICE:
            raise ValueError(
                f"module must have plain {DEVICE.upper()} tensors alone, got {weight.name}, a "
                f"{type(weight.tensor).__name__} on {weight.tensor.device}"
            )
        if weight.tensor._backward_hooks:
            raise ValueError(
                f"module's parameters must not have hooks on their gradients yet, got one on {weight.name}: it would "
                "run in the captured work and again after it; register it after the capture"
            )
    for argument, value in (("sample_args", args), ("sample_kwargs", kwargs)):
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, Tensor) and leaf.device.type != DEVICE:
                raise ValueError(f"{argument} must have {DEVICE.upper()} tensors alone, got one on {leaf.device}")
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise TypeError(f"{argument} must have tensors and constants alone, got {type(leaf).__name__}")


class _Flat(nn.Module):
    """``module`` from the tensors among its arguments to those among its results, without hooks, as torch wants it."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        super().__init__()
        self.module, self.leaves, self.spec = module, leaves, spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in self.leaves], self.spec)
        self.results, self.results_spec = tree_flatten(self.module(*args, **kwargs))
        for x in self.results:
            if not isinstance(x, (Tensor, *_CONSTANTS)):
                raise TypeError(
                    f"module must return tensors and constants alone, got {type(x).__name__} (transformers' models: "
                    "pass use_cache=False)"
                )
        return _tensors(self.results)


@contextlib.contextmanager
def _undone(weights: list[_Weight]) -> Iterator[None]:
    """Buffers and random numbers are as before afterwards: warm-up passes are not steps."""
    buffers = [(x, x.clone()) for x in (weight.tensor for weight in weights) if not isinstance(x, nn.Parameter)]
    devices = sorted({weight.tensor.device.index for weight in weights if weight.tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices, device_type=DEVICE):
            yield
    finally:
        for x, before in buffers:
            with torch.no_grad():
                x.copy_(before)


class GraphedModule(nn.Module):
    """What :func:`graphed` returns. ``module`` is the module that was captured."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_warmup_iters: int, pool: Any
    ) -> None:
        super().__init__()
        self.module = module
        self._sample, leaves = _sample(args, kwargs)
        self._weights = _weights(module)
        self._modes = [(each, each.training) for each in module.modules()]
        flat = _Flat(module, leaves, self._sample.spec)
        static = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in _tensors(leaves))
        dtype = self._sample.autocast
        # What autocast's cache holds would outlive the capture.
        uncached = torch.autocast(DEVICE, dtype, enabled=dtype is not None, cache_enabled=False)
        with _undone(self._weights), uncached:
            torch.cuda.make_graphed_callables(
                flat, static, num_warmup_iters=num_warmup_iters, allow_unused_input=True, pool=pool
            )
        self._replay = flat.forward  # which torch has replaced
        self._results, self._results_spec = flat.results, flat.results_spec
        self._latest: object | None = None
        self._addresses: set[int] = set()
        self._told: set[str] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() != self._sample.grad_enabled or any(m.training != was for m, was in self._modes):
            return self.module(*args, **kwargs)
        sample, leaves = _sample(args, kwargs)
        other = self._other(sample)
        if other is not None:
            if other not in self._told:
                self._told.add(other)
                warnings.warn(f"a graphed module runs without its graph: {other}", stacklevel=2)
            return self.module(*args, **kwargs)
        results = self._replay(*_tensors(leaves))
        node = next((x.grad_fn for x in results if x.grad_fn is not None), None)  # of all of them
        if node is not None:
            self._latest = this = object()
            node.register_prehook(functools.partial(self._before_backward, this))
            if not self._addresses:
                node.register_hook(self._after_backward)
        # People keep losses, which are not to change with the next call.
        given = iter([x.clone() if x.numel() == 1 else x for x in results])
        return tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in self._results], self._results_spec)

    def _other(self, sample: _Sample) -> str | None:
        """What is not as it was at the capture."""
        if sample != self._sample:
            return "the arguments' shapes, dtypes, constants or structure, or the autocast state, are not as captured"
        for weight in self._weights:
            if not weight.is_as_captured():
                return f"{weight.name} was replaced, moved, frozen or unfrozen since the capture; capture again"
        return None

    def _before_backward(self, this: object, _grads: tuple[Tensor | None, ...]) -> None:
        """A graph's memory has what one forward pass saves, until one backward pass has used it."""
        if self._latest is not this:
            raise RuntimeError(
                "a graphed module keeps what its last forward pass saved, for one backward pass: this backward pass is "
                "of an earlier forward pass, or the second one; capture one module for each pass in flight"
            )
        self._latest = None
        # A gradient that autograd took for p.grad as it is (pytorch #181723) would become the next one.
        for weight in self._weights:
            grad = weight.tensor.grad
            if grad is not None and grad.data_ptr() in self._addresses:
                weight.tensor.grad = grad.clone()

    def _after_backward(self, grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> None:
        self._addresses.update(grad.data_ptr() for grad in grads if grad is not None)


def graphed(
    module: nn.Module,
    sample_args: tuple[Any, ...] = (),
    sample_kwargs: Mapping[str, Any] | None = None,
    *,
    num_warmup_iters: int = 3,
    pool: Any = None,
) -> GraphedModule:
    """Captures a module's forward and backward pass in CUDA graphs, with what memkern's hooks do in them.

    ``torch.cuda.make_graphed_callables`` for modules that :func:`memkern.compress` has prepared, which have hooks.
    When the graphs are replayed no line of Python runs, so ``saved_bits`` costs what its kernels do. They read weights
    where these lie, as they are at each call, so the training loop stays as it is.

    Compared with torch's function:

    - keyword arguments, constants among the arguments, and dataclasses as results are allowed, as transformers' models
      have them;
    - a call that is not like the captured one (another shape, dtype, constant or autocast state, weights that were
      replaced, moved or frozen since) runs the module itself, with one warning; so do, without a warning, calls in
      evaluation mode or without gradients where the capture was with them, and the other way round;
    - gradients may be accumulated: autograd takes the graph's own memory for ``p.grad``, which the next backward pass
      would overwrite (pytorch #181723);
    - a backward pass of another forward pass than the last, or a second one, raises;
    - the module's buffers and the random number generators are as before afterwards.

    Results that are larger than one element are overwritten by the next call: clone what you keep. Gradients' memory
    stays allocated after ``zero_grad()``. What the module decides by values on the host (transformers' masks, routers
    of experts) cannot be captured, and CUDA says so. Other hooks on the module run during the capture alone.

    Args:
        module: parameters and buffers on a CUDA device, neither distributed nor offloaded, without hooks on gradients;
            in the mode (``train()``) and under the autocast state in which it will be called. Compress it before.
        sample_args: arguments by position as in training: tensors, whose values do not matter, and constants.
        sample_kwargs: arguments by name.
        num_warmup_iters: forward and backward passes before the capture.
        pool: of ``torch.cuda.graph_pool_handle()``: shared by modules that are called in the order of their captures.

    Returns:
        A module with ``module`` in its attribute ``module``, as DistributedDataParallel has it, to call in its place.

    Raises:
        TypeError: for another argument than a module, or one with arguments that are neither tensors nor constants.
        ValueError: for tensors elsewhere than on a CUDA device, distributed ones, ``offload=True``, hooks on gradients;
            before anything is captured.
    """
    kwargs = dict(sample_kwargs or {})
    _check(module, sample_args, kwargs)
    return GraphedModule(module, sample_args, kwargs, num_warmup_iters, pool)
