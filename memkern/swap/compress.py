"""``memkern.compress`` swaps a model's modules in place for those that save less, ``memkern.restore`` undoes it.

A module changes its class and gains a few attributes; it stays the same object with the same parameters, so hooks,
state_dict keys, optimizers, other modules' references to it and its training flag stay as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..fewbit.levels import check_bits
from ..nn.embedding import MARK
from ..nn.linear import RandomizedLinear
from .class_swap import is_changed_since, revert
from .report import Report
from .swap_plan import DEFAULT_BITS, MARKED, OUTPUT, Compression, Predicate

# Options of earlier versions, for which the error names what to use.
_REMOVED = ("saved_bits", "offload", "offload_ahead", "example")


def _check_activations(activations: Any) -> None:
    if isinstance(activations, str) and activations != OUTPUT:
        raise ValueError(f"activations must be 1 to 4 bits, 'output' or None, got {activations!r}")
    if activations is not None and not isinstance(activations, str):
        check_bits(activations)


def _linear_options(linear: float | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if linear is None:
        return None
    options = dict(linear) if isinstance(linear, Mapping) else {"share": linear}
    RandomizedLinear(1, 1, device="meta", **options)  # raises where one is not allowed
    return options


def compress(
    model: nn.Module,
    activations: int | str | None = DEFAULT_BITS,
    linear: float | Mapping[str, Any] | None = None,
    embeddings: bool = False,
    predicate: Predicate | None = None,
    **removed: Any,
) -> Report:
    """Makes a model save less for its backward pass, in place; returns what was done and how much less that is.

    Args:
        model: any module. Parameters, buffers, state_dict keys, hooks and flags stay as they are.
        activations: what activation functions save. 1 to 4 bits per element; ``"output"``: GELU and SiLU save their
            output and one bit, see :func:`memkern.functional.gelu`, and others 3 bits; None leaves them alone.
            Default 3. Swapped are torch.nn's elementwise activations (not PReLU and RReLU), transformers' (gelu_new
            and the other composites, GELUActivation, QuickGELUActivation, SiLUActivation, MishActivation, BloomGelu)
            and timm's, each known by its class; a composite becomes torch's fused function, which differs from it in
            the last bits.
        linear: share of the tokens that linear layers save (see :class:`memkern.nn.RandomizedLinear`), or a dict of
            its options; None leaves them alone. Default None. Swapped are torch.nn.Linear and GPT-2's Conv1D.
        embeddings: marks embeddings for 32-bit optimizer states, see :func:`memkern.optim.param_groups`; nothing else
            about them changes. Default False.
        predicate: ``predicate(name, module)`` chooses among those; by default all but ReLU, Tanh and Sigmoid (torch
            saves their output, which the next layer usually saves too) and linear layers that share their weight with
            another module, such as a head tied to the embedding.

    A module that occurs under several names is swapped once. Left alone and reported: subclasses, modules whose forward
    is set on the instance, activations and layers that have no counterpart (PReLU, LSTM, MultiheadAttention, ...),
    activations that nothing calls, and, as far as their code shows it, modules that call such a function themselves
    (``F.gelu(self.up(x))``), in forward or in a method that it calls. A second call changes what its arguments change;
    the same call again changes nothing. Compress before wrapping a model for sharding.

    Raises:
        TypeError: model is no module, or an argument that compress does not have.
        ValueError: an option out of range, or few-bit activations of a model whose parameters are all float64; before
            anything is changed.
    """
    for name in removed:
        hint = (
            ": what a compiled model saves, memkern.compile makes less; in eager mode, memkern.checkpoint_blocks does"
            if name in _REMOVED
            else ""
        )
        raise TypeError(f"compress() got an unexpected keyword argument {name!r}{hint}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_activations(activations)
    options = _linear_options(linear)
    compression = Compression(model, predicate)
    if compression.dtype == torch.float64 and activations is not None:
        raise ValueError(
            f"activations must be None for a float64 model (there are no codes for it), got {activations!r}"
        )
    if activations is not None:
        compression.activations(activations)
    if options is not None:
        compression.linears(options)
    if embeddings:
        compression.embeddings()
    return Report(tuple(compression.swapped), tuple(compression.left), tuple(compression.marked))


def restore(model: nn.Module) -> int:
    """Undoes every :func:`compress` of a model, in place; returns how many modules changed.

    Raises:
        RuntimeError: something else has changed the class of a swapped module since. Nothing is changed then.
    """
    for name, module in model.named_modules():
        if is_changed_since(module):
            raise RuntimeError(
                f"{name or 'the model'} has become a {type(module).__name__} since memkern.compress: remove its "
                "parametrizations, or call memkern.restore(model) before what changes classes, such as fully_shard"
            )
    count = 0
    for module in model.modules():
        changed = revert(module)
        if vars(module).pop(MARKED, False):
            del vars(module)[MARK]
            changed = True
        count += changed
    return count
