"""``memkern.compile``, and the backends "memkern" and "memkern_8bit" of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .blocks import compile_blocks, has_uncompiled_blocks, is_made_of_blocks
from .inductor import options_of_inductor

_OURS = ("saved_bits", "memory_budget", "activations", "codec_backend", "custom_partitioner_fn")
"""What ``options=`` must not have: arguments that memkern.compile makes its partitioner from, and a partitioner."""


def compile(
    model: Callable[..., Any],
    *,
    saved_bits: int | str = "exact",
    memory_budget: float | int | None = None,
    activations: int | None = None,
    codec_backend: str | None = None,
    blocks: str | bool = "auto",
    **options: Any,
) -> Any:
    """``torch.compile(model, ...)`` whose backward pass needs less memory.

    model: a module or a function. Where most layers of a module are in lists of like blocks, such as a transformer's,
        each block is compiled by itself, in place, and the module itself is returned: like blocks share one graph, so
        that the first step does not grow with the depth, and gradients are added and freed block by block. Its
        ``state_dict``, hooks and names stay, and copies and pickles of it are compiled too. Checkpoints,
        ``fully_shard`` and DDP are around the graphs. What is around the blocks runs uncompiled. Any other module is
        compiled as a whole.
    blocks: True: an error without a list of like blocks. False: the whole, as one graph, and the result is
        torch.compile's. Default ``"auto"``.
    saved_bits: ``"exact"``: torch's min-cut, which may compute elementwise operations again where torch keeps a copy of
        their result for a product; no value is rounded. ``8``: what may stand in 8-bit codes does, by the tables
        of memkern/compiled/rules.py (docs/compiled.md).
    memory_budget: how much each graph may save: a float in (0, 1], a share of the computed values that torch.compile
        saves, without the outputs; or an int, bytes. The first of these that is enough is done: what torch.compile
        does; elementwise operations computed again; with ``saved_bits=8`` as many values in codes as it takes; with
        ``"exact"`` products and attention computed again, while that lowers the peak. A warning names what is saved
        where nothing is enough.
    activations: 1 to 4: of an input of GELU, SiLU, Mish, Hardswish or log-sigmoid that is saved for their derivative
        alone, as many bits for each element, as with the modules of :mod:`memkern.nn`. Where the gradient of the next
        layer's weights needs the input as well, the input is saved anyway; so this is for frozen layers, as with LoRA.
    codec_backend: what computes 8-bit codes: ``"ops"``, memkern's kernels; ``"inductor"``, operations of torch that
        Inductor compiles into the kernels before and after, so that a GPU reads no tensor again. The codes are equal.
        None: ``"inductor"`` on NVIDIA's GPUs and ``"ops"`` elsewhere. Tensors whose last block is not full have ops.
    options: of :func:`torch.compile`, but for ``backend``, which is Inductor. What takes only a backend's name:
        ``torch.compile(model, backend="memkern")``, or ``"memkern_8bit"``.

    Raises ValueError for other values of these arguments, another backend or partitioner, or ``blocks=True`` without a
    list of like blocks, RuntimeError where torch's Inductor takes no partitioner.
    """
    if options.pop("backend", "inductor") != "inductor":
        raise ValueError("memkern.compile has Inductor as its backend; for others, use torch.compile")
    given = options.pop("options", None) or {}
    if refused := sorted({*given} & {*_OURS}):
        raise ValueError(f"options must not have {refused[0]!r}: memkern.compile has arguments for what is saved")
    if blocks not in ("auto", True, False):
        raise ValueError(f"blocks must be 'auto', True or False, got {blocks!r}")
    partitioner = (saved_bits, memory_budget, activations, codec_backend)
    of_inductor = options_of_inductor(given, options.pop("mode", None), *partitioner)
    if blocks:
        if has_uncompiled_blocks(model) and (blocks != "auto" or is_made_of_blocks(model)):
            return compile_blocks(model, {"options": of_inductor, **options})
        if blocks != "auto":
            raise ValueError("blocks=True given for what has no list of like blocks that are not compiled yet")
    return torch.compile(model, options=of_inductor, **options)


class Backend:
    """A backend of torch.compile, for callers that can pass only a name: Inductor with memkern's partitioner.

    ``torch.compile(model, backend="memkern")`` is ``memkern.compile(model)``, ``backend="memkern_8bit"`` has
    ``saved_bits=8``. ``options`` may have ``saved_bits``, ``memory_budget``, ``activations`` and ``codec_backend``
    beside Inductor's.
    """

    def __init__(self, name: str, saved_bits: int | str) -> None:
        self.__name__, self.saved_bits = name, saved_bits

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Tensor],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        given = dict(options or {})
        if "custom_partitioner_fn" in given:
            raise ValueError(f"options must not have 'custom_partitioner_fn': backend {self.__name__!r} has its own")
        saved_bits = given.pop("saved_bits", self.saved_bits)
        budget, activations = given.pop("memory_budget", None), given.pop("activations", None)
        codec_backend = given.pop("codec_backend", None)
        options = options_of_inductor(given, mode, saved_bits, budget, activations, codec_backend)
        return self._inductor(options)(graph, example_inputs)

    def reset(self) -> None:
        """What torch._dynamo.reset() calls: Inductor's own."""
        self._inductor({}).reset()

    def _inductor(self, options: dict[str, Any]) -> Any:
        from .torch_internals import TorchCompileInductorWrapper

        return TorchCompileInductorWrapper(None, options, None)


exact_backend = Backend("memkern", "exact")
coded_backend = Backend("memkern_8bit", 8)
