"""Changes one module's class in place, and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..library import is_own

ORIGINAL = "_memkern_original"
"""The attribute of a swapped module: its class before, attributes that were overwritten, names of all that were set."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def is_changed_since(module: nn.Module) -> bool:
    """Whether something else, such as a parametrization or fully_shard, has changed the class after a swap."""
    return ORIGINAL in vars(module) and not is_own(type(module))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class before a swap; the present one where it has changed since."""
    return type(module) if is_changed_since(module) else vars(module).get(ORIGINAL, (type(module),))[0]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without those of every torch.nn.Module."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def become(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
    """Changes the class and sets attributes; :func:`revert` undoes it. Those that it has already stay its own."""
    own = vars(module)
    attributes = {name: value for name, value in attributes.items() if name not in own or own[name] != value}
    overwritten = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    own[ORIGINAL] = (type(module), overwritten, tuple(attributes))
    module.__class__ = cls


def revert(module: nn.Module) -> bool:
    """Undoes :func:`become`; says whether there was anything to undo."""
    own = vars(module)
    if ORIGINAL not in own:
        return False
    module.__class__, overwritten, names = own.pop(ORIGINAL)
    for name in names:
        own.pop(name, None)
    own.update(overwritten)
    return True


def is_already(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> bool:
    """Whether a module has this class and these attributes already."""
    return type(module) is cls and attributes.items() <= vars(module).items()
