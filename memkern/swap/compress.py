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
from ..saved import hooks
from ..saved.hooks import SavedBits
from ..saved.link import BLOCKS, Offload
from ..saved.offload import options_of
from ..saved.session import EXACT, close_interrupted
from .block_lists import block_lists
from .class_swap import revert
from .measure import measure
from .prune import prune
from .report import Report
from .swap_plan import AUTO, MARKED, OUTPUT, RECOMPUTE, Compression, Predicate


def _check_activations(activations: Any) -> None:
    if isinstance(activations, str) and activations not in (AUTO, OUTPUT, RECOMPUTE):
        raise ValueError(f"activations must be 1 to 4 bits, 'auto', 'output', 'recompute' or None, got {activations!r}")
    if activations is not None and not isinstance(activations, str):
        check_bits(activations)


def _linear_options(linear: float | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if linear is None:
        return None
    options = dict(linear) if isinstance(linear, Mapping) else {"share": linear}
    RandomizedLinear(1, 1, device="meta", **options)  # checks them
    return options


def _offload_options(model: nn.Module, saved_bits: SavedBits, offload: bool, ahead: int | None) -> Offload | None:
    options = options_of(offload, ahead, max(map(len, block_lists(model)), default=BLOCKS))
    if options is not None and saved_bits is None:
        raise ValueError("offload is for what saved_bits stores, got offload=True with saved_bits=None")
    return options


def _check_float64(dtype: torch.dtype, activations: int | str | None, saved_bits: SavedBits) -> None:
    exact = activations in (None, RECOMPUTE) or (activations == AUTO and saved_bits == EXACT)
    if dtype == torch.float64 and not exact:
        raise ValueError(
            "activations must be 'recompute' or None for a float64 model (there are no codes for it), got "
            f"{activations!r}"
        )


def compress(
    model: nn.Module,
    activations: int | str | None = AUTO,
    linear: float | Mapping[str, Any] | None = None,
    embeddings: bool = False,
    predicate: Predicate | None = None,
    *,
    saved_bits: SavedBits = None,
    offload: bool = False,
    offload_ahead: int | None = None,
    example: Any = None,
) -> Report:
    """Makes a model save less for its backward pass, in place; returns what was done and how much less that is.

    Args:
        model: any module. Parameters, buffers, state_dict keys, hooks and flags stay as they are.
        activations: what activation functions save. 1 to 4 bits per element; ``"output"``: GELU and SiLU save their
            output and one bit, see :func:`memkern.functional.gelu`; ``"recompute"``: composites of several operations
            save their input and are run again in the backward pass, which gives the bits of torch; None leaves them
            alone. Default ``"auto"``: 3 bits, and ``"recompute"`` in modules that ``saved_bits`` covers, where
            recomputing the output saves more than bits do and rounds less. Swapped are torch.nn's elementwise
            activations (not PReLU and RReLU), and by name, if the operations of their forward are those of the function
            (as torch.fx records them; nothing is run, and an attribute that could be set later is no constant),
            transformers' (gelu_new and the other composites, GELUActivation, QuickGELUActivation,
            SiLUActivation, MishActivation, BloomGelu), minGPT's NewGELU, CLIP's QuickGELU and timm's. With bits or
            ``"output"`` a composite's forward changes in the last bits: it becomes torch's fused one. Outside of
            ``saved_bits``, gated units whose gate and up come out of one layer (Phi-3's MLP, Mixtral's experts) become
            :func:`memkern.functional.swiglu` or ``geglu``, exactly, if their forward is proved in the same way.
        linear: share of the tokens that linear layers save (see :class:`memkern.nn.RandomizedLinear`), or a dict of
            its options; None leaves them alone. Default None. Swapped are torch.nn.Linear and GPT-2's Conv1D.
        embeddings: marks embeddings for 32-bit optimizer states, see :func:`memkern.optim.param_groups`; nothing else
            about them changes. Default False.
        predicate: ``predicate(name, module)`` chooses among those; by default all but ReLU, Tanh and Sigmoid (torch
            saves their output, which the next layer usually saves too) and linear layers that share their weight with
            another module, such as a head tied to the embedding.
        saved_bits: puts the context of :class:`memkern.quantize_saved` around the forward pass: ``8`` (1.03 bytes per
            element of what is left; errors of the gradient by class: queries and keys 1.4 %, log-probabilities .8 %,
            values and attention's output .4 %, inputs of norms, gate and up .3 %), ``"exact"``, or None, which changes
            nothing. Or by module: a mapping from names or patterns
            (``{"model.layers.*": 8, "model.layers.0": None}``, the last that fits counts, submodules inherit), or
            ``saved_bits(name, module)``, called for every module, which returns 8, "exact" or None (as torch saves).
            Where few-bit activations are asked for too, they win. The context is not opened inside of
            torch.compile, where the compiler decides what is saved.
        offload: what ``saved_bits`` stores goes to pinned host memory and comes back before the backward pass needs
            it, see :class:`memkern.quantize_saved`. Default False.
        offload_ahead: bytes that stay on the device or are back on it early; default: what the model's forward pass
            stores, divided by the number of its blocks.
        example: a batch (one tensor, a tuple of arguments, or a dict of keyword arguments) on which the model is run
            before and after, with the graph alive: the report then says what was really saved, by module, and swaps
            that save nothing on it are taken back. Without it the report says what is possible at most.

    A module that occurs under several names is swapped once. Left alone and reported: subclasses, modules whose forward
    is set on the instance, activations and layers that have no counterpart (ELU, PReLU, LSTM, MultiheadAttention, ...),
    activations that nothing calls, and, as far as their code shows it, modules that call such a function themselves
    (``F.gelu(self.up(x))``), in forward or in a method that it calls. A second call changes what its arguments change;
    the same call again changes nothing. Compress before wrapping a model for sharding.

    Raises:
        TypeError: model is no module.
        ValueError: an option out of range, few-bit activations of a model whose parameters are all float64, or
            offload without saved_bits; before anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_activations(activations)
    options = _linear_options(linear)
    hooks.check(model, saved_bits)
    offload_options = _offload_options(model, saved_bits, offload, offload_ahead)
    wanted = None if saved_bits is None else hooks.modes(model, saved_bits)
    before = None if example is None else measure(model, example)
    covered = hooks.covered(model) if wanted is None else {module: bits for _, module, bits, _ in wanted}
    compression = Compression(model, predicate, covered)
    _check_float64(compression.dtype, activations, saved_bits)
    if activations is not None:
        compression.activations(activations)
    if options is not None:
        compression.linears(options)
    if embeddings:
        compression.embeddings()
    if wanted is not None:
        hooks.install(model, wanted, offload_options)
    if before is not None:
        prune(model, example, compression)
    return Report(
        tuple(compression.swapped),
        tuple(compression.left),
        tuple(compression.marked),
        saved=tuple(hooks.installed(model)),
        offload=any(given is not None for _, _, given in hooks.state_of(model)),
        before=before,
        after=None if before is None else measure(model, example),
    )


def restore(model: nn.Module) -> int:
    """Undoes every :func:`compress` of a model, in place; returns how many modules changed."""
    count = 0
    close_interrupted()
    for module in model.modules():
        changed = revert(module)
        if vars(module).pop(MARKED, False):
            del vars(module)[MARK]
            changed = True
        count += hooks.remove(module) or changed
    return count
