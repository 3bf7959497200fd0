"""Parameter groups of a model: who decays, and whose states stay at 32 bits."""

from __future__ import annotations

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
    """The groups of all parameters of a model, for any optimizer of memkern or torch.

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
