"""For timm: memkern's optimizers in the registry of its factory.

::

    from memkern.integrations.timm import register

    register()
    optimizer = timm.optim.create_optimizer_v2(model, "memkern_adamw8bit", lr=1e-3, weight_decay=0.05, layer_decay=0.7)

``register`` adds, for each optimizer, the name ``memkernNAME`` (``memkernadamw8bit``, ``memkernlamb``), as timm writes
``bnbadamw8bit``. The factory cuts a name at its last underscore (``lookahead_adamw``): ``memkern_adamw8bit`` is found
as ``adamw8bit``, so the 8-bit ones are registered under that too. ``memkern_adamw`` would be torch's: write
``memkernadamw``. Parameter groups, decay and layer decay are timm's; ``opt_args`` reach the optimizer.

``memkern_muon8bit`` and ``memkernmuon`` step matrices by Muon, and by AdamW the others and what timm's
``fallback_list`` names. Embeddings and heads belong into it: ``fallback_list=["head*", "*embed*"]``. Both algorithms
have one learning rate, by ``adjust_lr_fn="match_rms_adamw"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from ..optim import Muon
from . import names

PREFIX = "memkern"


def _muon_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """timm's groups, each in matrices for Muon and the others for AdamW; ``use_fallback``: all for AdamW."""
    params = [*params]
    given = params if params and isinstance(params[0], dict) else [{"params": params}]
    found = []
    for group in given:
        own = {key: value for key, value in group.items() if key not in ("params", "use_fallback")}
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for item in group["params"]:
            p = item[1] if isinstance(item, tuple) else item
            matrix = p.dim() == 2 or (p.dim() == 3 and p.shape[0] > 1)
            parts["muon" if matrix and not group.get("use_fallback") else "adamw"].append(item)
        found += [{**own, "params": some, "algorithm": name} for name, some in parts.items() if some]
    return found


def _of_timms_groups(cls: type[Muon]) -> Callable[..., Muon]:
    def make(params: Iterable[Any], adjust_lr_fn: str | None = "match_rms_adamw", **options: Any) -> Muon:
        return cls(_muon_groups(params), adjust_lr_fn=adjust_lr_fn, **options)

    return make


MUON = {name: _of_timms_groups(cls) for name, cls in names.optimizers().items() if issubclass(cls, Muon)}


def _info(name: str, cls: type) -> OptimInfo:
    own = inspect.signature(cls).parameters
    return OptimInfo(
        name=name,
        opt_class=MUON.get(cls.__name__.lower(), cls),
        description=f"memkern {cls.__name__}",
        has_eps="eps" in own,
        has_momentum="momentum" in own,
        has_betas="betas" in own,
    )


def register() -> list[str]:
    """Adds memkern's optimizers to timm's registry, once; returns their names.

    Raises:
        ValueError: timm has another optimizer of one of the names; nothing is added then.
    """
    wanted: dict[str, type] = {}
    for name, cls in names.optimizers().items():
        wanted[f"{PREFIX}{name}"] = cls
        if name.endswith("8bit"):
            wanted[f"{PREFIX}_{name}"] = wanted[name] = cls
    present = {*default_registry.list_optimizers()} & {*wanted}
    for name in sorted(present):
        if default_registry.get_optimizer_info(name).opt_class is not _info(name, wanted[name]).opt_class:
            raise ValueError(
                f"timm has an optimizer {name} of its own; take memkern.optim.{wanted[name].__name__} itself"
            )
    for name in wanted.keys() - present:
        default_registry.register(_info(name, wanted[name]))
    return sorted(wanted)
