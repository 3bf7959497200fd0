"""Adds memkern's optimizers to the registry of timm's optimizer factory.

::

    from memkern.integrations.timm import register

    register()
    optimizer = timm.optim.create_optimizer_v2(model, "memkern_adamw8bit", lr=1e-3, weight_decay=0.05, layer_decay=0.7)

``register`` adds, for each optimizer, the name ``memkernNAME`` (``memkernadamw8bit``, ``memkernlamb``), as timm writes
``bnbadamw8bit``. The factory cuts a name at its last underscore (``lookahead_adamw``): ``memkern_adamw8bit`` is found
as ``adamw8bit``, so the 8-bit ones are registered under that too. ``memkern_adamw`` would be torch's: write
``memkernadamw``. Parameter groups, decay and layer decay are timm's; ``opt_args`` reach the optimizer.

Muon is not among them: its groups say which parameters are matrices (:func:`memkern.optim.muon_groups`).
"""

from __future__ import annotations

import inspect

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from ..optim import Muon
from . import names

PREFIX = "memkern"


def _optimizers() -> dict[str, type]:
    return {name: cls for name, cls in names.optimizers().items() if not issubclass(cls, Muon)}


def _info(name: str, cls: type) -> OptimInfo:
    arguments = inspect.signature(cls).parameters
    return OptimInfo(
        name=name,
        opt_class=cls,
        description=f"memkern {cls.__name__}",
        has_eps="eps" in arguments,
        has_momentum="momentum" in arguments,
        has_betas="betas" in arguments,
    )


def register() -> list[str]:
    """Adds memkern's optimizers to timm's registry, once; returns their names.

    Raises:
        ValueError: timm has another optimizer of one of the names; nothing is added then.
    """
    wanted: dict[str, type] = {}
    for name, cls in _optimizers().items():
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
