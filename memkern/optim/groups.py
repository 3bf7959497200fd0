"""Makes the parameter groups of a model: which parameters decay, which keep 32-bit states, and which are Muon's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..nn.embedding import state_bits_of
from .dtensor.shards import check_whole
from .roles import WITHOUT_DECAY, roles


def _requested_bits(model: nn.Module) -> dict[Tensor, int]:
    """The state bits that modules ask for, by their parameters and not by names, which wrappers change."""
    bits_of: dict[Tensor, int] = {}
    for name, module in model.named_modules():
        bits = state_bits_of(module)
        if bits is None:
            continue
        parameters = list(module.parameters())
        if not parameters:
            raise ValueError(
                f"model: {name or type(module).__name__} asks for {bits}-bit optimizer states and has no parameters of "
                "its own; a wrapper has joined them with others: with FullyShardedDataParallel set "
                "use_orig_params=True"
            )
        bits_of.update(dict.fromkeys(parameters, bits))
    return bits_of


def param_groups(model: nn.Module, *, weight_decay: float | None = None, **options: Any) -> list[dict[str, Any]]:
    """The groups of a model's parameters that require a gradient, for any optimizer of memkern or torch.

    Parameters of modules that ask for it (:class:`memkern.nn.StableEmbedding`, embeddings after
    ``memkern.compress(model, embeddings=True)``) get the option ``state_bits=32``; a parameter that such a module
    shares with another, too. Works before and after wrapping (DistributedDataParallel, torch.compile, fully_shard).

    Args:
        model: its parameters, each once and in their order within a group.
        weight_decay: where given, for tensors of two or more dimensions; the others (biases, norms) get 0. Where a
            wrapper has flattened the shards, their shapes do not tell: leave it out, or make the groups before.
        options: options that all groups get, such as lr.

    Returns groups that are not empty, at most four.

    Raises:
        ValueError: a wrapper has joined a marked module's parameters with others.
        TypeError: options name params.
    """
    bits_of = _requested_bits(model)
    groups: dict[tuple[bool, int | None], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        decays, bits = weight_decay is None or parameter.dim() >= 2, bits_of.get(parameter)
        if (decays, bits) not in groups:
            group = dict(params=[], **options)
            if weight_decay is not None:
                group["weight_decay"] = weight_decay if decays else 0.0
            if bits is not None:
                group["state_bits"] = bits
            groups[decays, bits] = group
        groups[decays, bits]["params"].append(parameter)
    return list(groups.values())


class MuonGroups(list[dict[str, Any]]):
    """The groups of :func:`muon_groups`; ``print`` shows which parameter went where, and why.

    reasons: by a parameter's name, the algorithm of its group and the reason for it.
    doubts: the names of parameters whose algorithm only a rule for unknown modules has decided.
    """

    reasons: dict[str, tuple[str, str]]
    doubts: list[str]

    def __str__(self) -> str:
        lines: dict[tuple[str, str], list[str]] = {}
        for name, algorithm_and_reason in self.reasons.items():
            lines.setdefault(algorithm_and_reason, []).append(name)
        return "\n".join(f"{algorithm}, {reason}: {', '.join(names)}" for (algorithm, reason), names in lines.items())


def muon_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    adamw: Callable[[str, Tensor], bool] | None = None,
    muon: Callable[[str, Tensor], bool] | None = None,
    split: Callable[[str, Tensor], Sequence[int] | None] | None = None,
    strict: bool = False,
    **options: Any,
) -> MuonGroups:
    """The groups of a model for :class:`memkern.optim.Muon`: matrices for Muon, everything else for AdamW.

    The module that a parameter belongs to decides. Wrappers do not count (torch.compile, checkpoints,
    DistributedDataParallel, PEFT's trained copies), and a tensor of weight_norm or spectral_norm is its module's.

    - Muon: matrices of Linear and its subclasses (LoRA's too), Bilinear, MultiheadAttention, LSTM, GRU, RNN and
      transformers' Conv1D; experts (three dimensions) and their routers, by their name or their class's.
    - AdamW: embeddings and what is tied to them, norms, convolutions, biases, vectors (also as a matrix of one row or
      column), tensors of three dimensions whose first has size 1, parameters with embed, pos or token in their own
      name; output heads.
    - Output heads: what ``get_output_embeddings()`` returns; modules or parameters named lm_head, embed_out, head,
      classifier, score, qa_outputs, text_projection, visual_projection and the like, of several layers the last;
      outside of lists of layers output, out, fc, proj_out, logits, and what ends in _head, _classifier, _logits,
      _predictor. Where there is none, the Linear that the model's own modules or its last Sequential end in.
    - Parameters of modules of unknown classes (``F.linear(x, self.weight)``, ``A_log``, codebooks), or behind unknown
      parametrizations: Muon where the parameter's own name is weight, kernel, proj, w1 or ends in one of these, AdamW
      otherwise. These are doubts: ``doubts`` has their names, and ``strict`` raises.

    Matrices that hold several, such as those of query, key and value, are orthogonalized as one unless ``split`` gives
    their sizes; Jordan et al. found it better to take query, key and value each by itself.

    Args:
        model: its parameters that require a gradient, each once, under its first name.
        lr, adamw_lr: of Muon's group and of AdamW's. With ``adjust_lr_fn="match_rms_adamw"`` both may be the same.
        weight_decay: of matrices and more; vectors, biases and norms get 0.
        adamw, muon: ``adamw(name, parameter)`` is true for parameters that go to AdamW whatever they are for, and
            ``muon(name, parameter)`` for those that go to Muon; adamw is asked first.
        split: ``split(name, parameter)`` is the group's ``split`` for a matrix of Muon's, or None, see :class:`Muon`.
        strict: raise where a parameter is in doubt and neither ``adamw`` nor ``muon`` names it.
        options: options that all groups get.

    Returns groups that are not empty; AdamW's parameters of modules that ask for it have 32-bit states, as by
    :func:`param_groups`. ``print`` shows what went where, and why.

    Raises:
        ValueError: a wrapper has joined a marked module's parameters with others; a model under FSDP1
            (FullyShardedDataParallel), whose flat shards are no matrices; with strict, parameters in doubt.
        TypeError: options name params or algorithm.
    """
    bits_of, role_of = _requested_bits(model), roles(model)
    result, groups = MuonGroups(), {}
    result.reasons, result.doubts = {}, []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        check_whole(f"model: {name}", p)
        algorithm, reason, sure = role_of[p]
        decay = 0.0 if reason in WITHOUT_DECAY else weight_decay
        chosen = [key for key, picks in (("adamw", adamw), ("muon", muon)) if picks is not None and picks(name, p)]
        if chosen and (chosen[0], sure) != (algorithm, True):  # not where the role surely says the same
            algorithm, reason, sure = chosen[0], "asked for", True
        result.reasons[name] = algorithm, reason
        if not sure:
            result.doubts.append(name)
        bits = bits_of.get(p) if algorithm == "adamw" else None
        parts = None if algorithm == "adamw" or split is None else split(name, p)
        key = algorithm, decay, bits, parts and tuple(parts)
        if key not in groups:
            rate = adamw_lr if algorithm == "adamw" else lr
            groups[key] = dict(params=[], algorithm=algorithm, lr=rate, weight_decay=decay, **options)
            if bits is not None:
                groups[key]["state_bits"] = bits
            if parts:
                groups[key]["split"] = tuple(parts)
        groups[key]["params"].append(p)
    if strict and result.doubts:
        listed = ", ".join(f"{name} ({': '.join(result.reasons[name])})" for name in result.doubts)
        raise ValueError(
            f"model: no module that is known says what these are for: {listed}; name them with adamw= or muon=, or "
            "leave strict=False to have them as in brackets"
        )
    result += groups.values()
    return result
