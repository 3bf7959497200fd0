"""Tells TorchDynamo what it needs to know; imports it where something is compiled and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which imports TorchDynamo (2 s) to set this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
