"""Parameter groups of a model: who decays, and whose states stay at 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..nn.embedding import state_bits_of


def _marked(model: nn.Module) -> dict[Tensor, int]:
    """Parameters of marked modules, with their bits. By identity, so that no wrapper's renaming matters."""
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


def param_groups(
    model: nn.Module, *, weight_decay: float | None = None, **options: Any
) -> list[dict[str, Any]]:
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
    bits_of = _marked(model)
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

    reasons: by the parameter's name, its group's algorithm and the reason.
    """

    reasons: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        lines: dict[tuple[str, str], list[str]] = {}
        for name, found in self.reasons.items():
            lines.setdefault(found, []).append(name)
        return "\n".join(
            f"{algorithm}, {reason}: {', '.join(names)}" for (algorithm, reason), names in lines.items()
        )


_HEADS = ("lm_head", "embed_out", "head", "classifier", "score")
_LAST = ("output", "fc", "proj_out")  # heads where they are not in a list of layers
_TABLES = ("embed", "pos", "token")  # in the name of a parameter that no module of torch's looks up


def _reasons_for_adamw(model: nn.Module) -> dict[Tensor, str]:
    """Matrices that Muon is not for, and why."""
    found: dict[Tensor, str] = {}
    models: list[Any] = [*model.modules()]
    heads = [m.get_output_embeddings() for m in models if hasattr(m, "get_output_embeddings")]
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        in_list = any(part.isdigit() for part in name.split("."))
        for own_name, p in module.named_parameters(recurse=False):
            if own_name != "weight" and any(part in own_name for part in _TABLES):
                found.setdefault(p, "an embedding, by its name")
        own = module.parameters(recurse=False)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            reason = "an embedding"
        elif any(module is head for head in heads) or last in _HEADS or (last in _LAST and not in_list):
            reason = "an output head"
        elif isinstance(module, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)):
            reason = "a convolution"
        else:
            continue
        for p in own:
            found.setdefault(p, reason)
    return found


def muon_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    adamw: Callable[[str, Tensor], bool] | None = None,
    split: Callable[[str, Tensor], Sequence[int] | None] | None = None,
    **options: Any,
) -> MuonGroups:
    """The groups of a model for :class:`memkern.optim.Muon`: matrices for Muon, everything else for AdamW.

    AdamW gets embeddings (and heads that are tied to them; parameters with embed, pos or token in their own name too),
    output heads (what ``get_output_embeddings()`` returns, modules whose last name is lm_head, embed_out, head,
    classifier or score, and those named output, fc or proj_out outside of lists of layers), convolutions, vectors, and
    tensors of three dimensions or more whose first has size 1, such as a ViT's positions. Other tensors of three
    dimensions, such as the stacked experts of a mixture, are batches of matrices for Muon. Matrices that hold several,
    such as those of query, key and value, are orthogonalized as one unless ``split`` gives their sizes; Jordan et al.
    found it better to take query, key and value each by itself.

    Args:
        model: its parameters that require a gradient, each once, under its first name.
        lr, adamw_lr: of Muon's group and of AdamW's. With ``adjust_lr_fn="match_rms_adamw"`` both may be the same.
        weight_decay: of tensors of two dimensions or more; others get 0.
        adamw: ``adamw(name, parameter)`` is true for further parameters that AdamW is to have.
        split: ``split(name, parameter)`` is the group's ``split`` for a matrix of Muon's, or None, see :class:`Muon`.
        options: options that all groups get.

    Returns groups that are not empty; AdamW's parameters of modules that ask for it have 32-bit states, as by
    :func:`param_groups`. ``print`` shows what went where, and why.

    Raises:
        ValueError: a wrapper has joined a marked module's parameters with others.
        TypeError: options name params or algorithm.
    """
    bits_of, reasons = _marked(model), _reasons_for_adamw(model)
    found, groups = MuonGroups(), {}
    found.reasons = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        reason = "" if p.dim() >= 2 else "a vector"
        reason = reason or reasons.get(p, "") or ("asked for" if adamw is not None and adamw(name, p) else "")
        if not reason and p.dim() > 2 and p.shape[0] == 1:
            reason = "one matrix of three dimensions"
        algorithm = "adamw" if reason else "muon"
        found.reasons[name] = algorithm, reason or ("a matrix" if p.dim() == 2 else "a batch of matrices")
        bits = bits_of.get(p) if reason else None
        decay = weight_decay if p.dim() >= 2 else 0.0
        parts = None if reason or split is None else split(name, p)
        if (key := (algorithm, decay, bits, parts and tuple(parts))) not in groups:
            rate = adamw_lr if reason else lr
            groups[key] = dict(params=[], algorithm=algorithm, lr=rate, weight_decay=decay, **options)
            if bits is not None:
                groups[key]["state_bits"] = bits
            if parts:
                groups[key]["split"] = tuple(parts)
        groups[key]["params"].append(p)
    found += groups.values()
    return found
