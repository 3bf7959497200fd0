"""``compress(model, saved_bits=...)``: the context of :mod:`memkern.saved.session` around modules' forward passes.

A module's mode, and two forward hooks that open and close the context, are all that is put on it, so that deepcopy,
pickle, state_dict and sharding see nothing new. The hooks are functions of this file: they are found again by identity.
"""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..functions.autograd import is_recorded
from .link import Offload
from .session import EXACT, check_bits, close_interrupted, new_session, open_sessions

SAVED = "_memkern_saved_bits"
OFFLOAD = "_memkern_offload"
Bits = int | str | None
SavedBits = Bits | Mapping[str, Bits] | Callable[[str, nn.Module], Bits]


def _tensors_of(call: Any) -> Iterator[Tensor]:
    for item in call:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _tensors_of(item)
        elif isinstance(item, Mapping):  # transformers' outputs too
            yield from _tensors_of(item.values())


def _enter(module: nn.Module, args: Any) -> None:
    _open(module, sys._getframe(1))


def _enter_base(module: nn.Module, args: Any) -> None:
    """Of a model's ``base_model``: a loop that computes the loss itself may call it in place of the model."""
    if not open_sessions():
        _open(module, sys._getframe(1))


def _open(module: nn.Module, frame: types.FrameType) -> None:
    if torch.compiler.is_compiling() or is_recorded() or not torch.is_grad_enabled():
        return
    close_interrupted()
    session = new_session(vars(module)[SAVED], module, frame, vars(module).get(OFFLOAD))
    if not open_sessions():
        session.note_leaves()
    session.enter()
    open_sessions().append(session)


def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    sessions = open_sessions()
    if sessions and sessions[-1].module is module:
        # The arguments are still held by variables of the caller, which will soon drop them.
        sessions.pop().exit(_tensors_of((args, kwargs)), _tensors_of((output,)))


class SavingStep:
    """Calls a method of a module with hooks, in the context that a call of the module would open."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        self.module, self.__wrapped__ = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_installed(self.module) or not torch.is_grad_enabled():  # restored meanwhile
            return self.__wrapped__(*args, **kwargs)
        session = new_session(vars(self.module)[SAVED], self.module, offload=vars(self.module).get(OFFLOAD))
        session.note_leaves()
        session.enter()
        outputs: list[Any] = []
        try:
            outputs.append(self.__wrapped__(*args, **kwargs))
            return outputs[0]
        finally:
            close_interrupted()
            session.exit(_tensors_of((args, kwargs)), _tensors_of(outputs))


def is_installed(module: nn.Module) -> bool:
    return SAVED in vars(module)


def _install(module: nn.Module, bits: Bits, offload: Offload | None, base: bool = False) -> None:
    vars(module)[SAVED] = bits
    if offload is not None:
        vars(module)[OFFLOAD] = offload
    module.register_forward_pre_hook(_enter_base if base else _enter)
    module.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def remove(module: nn.Module) -> bool:
    """Takes the hooks off one module; says whether there were any."""
    if not is_installed(module):
        return False
    del vars(module)[SAVED]
    vars(module).pop(OFFLOAD, None)
    before = module._forward_pre_hooks
    after = module._forward_hooks
    for hooks, own in ((before, _enter), (before, _enter_base), (after, _leave)):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)
    return True


def _fits(name: str, pattern: str) -> bool:
    """Whether a module's name is as the pattern says, part by part: ``*`` stands for no dot."""
    own, wanted = name.split("."), pattern.split(".")
    return len(own) == len(wanted) and all(map(fnmatch.fnmatchcase, own, wanted))


def check(model: nn.Module, saved_bits: SavedBits) -> None:
    """Raises ValueError or TypeError unless ``saved_bits`` can be had for the model."""
    if saved_bits is None:
        return
    if isinstance(saved_bits, Mapping):
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for pattern, bits in saved_bits.items():
            if bits is not None:
                check_bits(bits, f"saved_bits[{pattern!r}]")
            if not any(_fits(name, pattern) for name in names):
                raise ValueError(f"saved_bits names {pattern!r}, and the model has no such module")
    elif not callable(saved_bits):
        check_bits(saved_bits, "saved_bits")
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if not floats:
        raise ValueError("saved_bits needs a model with floating-point parameters or buffers, and this one has none")
    if all(t.dtype == torch.float64 for t in floats) and saved_bits != EXACT:
        raise ValueError("saved_bits: there are no 8-bit codes for float64 models; use saved_bits='exact'")


def _own(name: str, module: nn.Module, inherited: Bits, saved_bits: SavedBits) -> Bits:
    if isinstance(saved_bits, Mapping):
        found = [bits for pattern, bits in saved_bits.items() if _fits(name, pattern)]
        return found[-1] if found else inherited
    if callable(saved_bits):
        bits = saved_bits(name, module)
        if bits in (True, False, None):
            return 8 if bits else None
        check_bits(bits, f"saved_bits of {name!r}")
        return bits
    return saved_bits


Modes = list[tuple[str, nn.Module, Bits, Bits]]


_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def modes(model: nn.Module, saved_bits: SavedBits) -> Modes:
    """(name, module, its mode, the mode around it) of every module once, under its first name."""
    rows: Modes = []
    found: dict[str, Bits] = {}
    around: dict[str, Bits] = {}  # inside a module's forward pass; lists and dicts of modules have none
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        inherited, outside = (found.get(parent), around.get(parent)) if name else (None, None)
        found[name] = _own(name, module, inherited, saved_bits)
        around[name] = outside if isinstance(module, _NEVER_CALLED) else found[name]
        rows.append((name, module, found[name], outside))
    return rows


def set_ahead(model: nn.Module, ahead: int) -> None:
    """Gives ``offload_ahead`` to the modules of a model that have hooks with offload."""
    for module in model.modules():
        if OFFLOAD in vars(module):
            vars(module)[OFFLOAD] = vars(module)[OFFLOAD]._replace(ahead=ahead)


def install(model: nn.Module, wanted: Modes, offload: Offload | None = None) -> None:
    """Puts the hooks where the mode differs from the one around, and nowhere else. offload: of all of them."""
    close_interrupted()
    for module in model.modules():
        remove(module)
    for _, module, bits, outside in wanted:
        if bits != outside and not isinstance(module, _NEVER_CALLED):
            _install(module, bits, offload)
    _install_on_base(model)


def _install_on_base(model: nn.Module) -> None:
    """Hooks for calls of a ``base_model`` (transformers) in place of the model, whose mode it has."""
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module) and is_installed(model) and not is_installed(base):
        _install(base, vars(model)[SAVED], vars(model).get(OFFLOAD), base=True)


def installed(model: nn.Module) -> list[tuple[str, Bits]]:
    """The modules with hooks of their own, and their modes."""
    return [(name, vars(m)[SAVED]) for name, m in model.named_modules() if is_installed(m) and not _is_base(m)]


def _is_base(module: nn.Module) -> bool:
    return _enter_base in module._forward_pre_hooks.values()


def covered(model: nn.Module) -> dict[nn.Module, Bits]:
    """The mode of every module as the hooks stand."""
    own = dict(installed(model))
    return {module: bits for _, module, bits, _ in modes(model, own)} if own else {}


def state_of(model: nn.Module) -> list[tuple[str, Bits, Offload | None]]:
    """The modules with hooks, and all options of each."""
    modules = dict(model.named_modules())
    return [(name, bits, vars(modules[name]).get(OFFLOAD)) for name, bits in installed(model)]
