"""States the options that all optimizers share once: their types, defaults, and places in signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict


class StorageOptions(TypedDict, total=False):
    """How states and bf16 weights are stored. A group may have its own."""

    state_bits: int
    block_size: int
    codec: str
    min_8bit_size: int
    master_weights: str | None
    stochastic_rounding: bool


class SharedOptions(StorageOptions, total=False):
    """The options that every optimizer has beside torch.optim's."""

    max_grad_norm: float | None


DEFAULTS: SharedOptions = {
    "state_bits": 32,
    "block_size": 128,
    "codec": "power",
    "min_8bit_size": 4096,
    "master_weights": None,
    "stochastic_rounding": False,
    "max_grad_norm": None,
}
DEFAULTS_8BIT: SharedOptions = {**DEFAULTS, "state_bits": 8}
"""Defaults of the classes whose names end in 8bit."""


def check_names(name: str, options: Iterable[str]) -> None:
    """Raises TypeError, as Python would, for an option that is not shared. ``name``: of the class, for the error."""
    if unknown := [option for option in options if option not in DEFAULTS]:
        raise TypeError(f"{name}.__init__() got an unexpected keyword argument {unknown[0]!r}")


def full_signature(function: Any, defaults: Mapping[str, object]) -> inspect.Signature:
    """The signature of a class, from its ``__init__``.

    In place of ``**options: Unpack[SharedOptions]``, or StorageOptions, it has each of these options.
    """
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return signature.replace(parameters=parameters)
    *parameters, last = parameters
    if last.annotation not in _UNPACKED:
        return signature.replace(parameters=[*parameters, last])
    types = _UNPACKED[last.annotation].__annotations__  # with those of the TypedDict that it extends
    options = (
        inspect.Parameter(
            option, inspect.Parameter.KEYWORD_ONLY, default=defaults[option],
            annotation=getattr(types[option], "__forward_arg__", types[option]),
        )
        for option in types
    )  # fmt: skip
    return signature.replace(parameters=[*parameters, *options])


_UNPACKED: dict[Any, Any] = {f"Unpack[{options.__name__}]": options for options in (StorageOptions, SharedOptions)}
