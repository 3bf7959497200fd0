"""The gradient of a chain of elementwise operations by autograd's formulas in autograd's order: its bits, no graph.

Autograd runs a chain again with a node and its saved tensors for each operation. Here its kernels alone are called, but
those whose results no derivative needs, and the results of some are written over what is not needed any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """An operation on values, by their numbers: 0 is x, k the result of the k-th step. number: another operand."""

    operation: str
    values: tuple[int, ...]
    number: Any = None


class _Operation(NamedTuple):
    """Python expressions of the values ``a`` and ``b``, the number ``n``, the result ``y`` and its gradient ``g``.

    forward_in_place, backward_in_place: the same in the memory of ``a`` and of ``g``. backward: for each value.
    """

    forward: str
    backward: tuple[str, ...]
    forward_in_place: str = ""
    backward_in_place: str = ""


_OPERATIONS = {  # the formulas are those of torch's derivatives.yaml and FunctionsManual.cpp
    "mul": _Operation("{a} * {b}", ("{g} * {b}", "{g} * {a}")),
    "mul number": _Operation("{a} * {n}", ("{g} * {n}",), "{a}.mul_({n})", "{g}.mul_({n})"),
    "add": _Operation("{a} + {b}", ("{g}", "{g}")),
    "add number": _Operation("{a} + {n}", ("{g}",), "{a}.add_({n})"),
    "div number": _Operation("{a} / {n}", ("{g} / {n}",), "{a}.div_({n})", "{g}.div_({n})"),
    "pow number": _Operation(
        "{a}.pow({n})",
        ("{g} * {a}.pow(float({n}) - 1).mul_(float({n}))",),
        backward_in_place="{g}.mul_({a}.pow(float({n}) - 1).mul_(float({n})))",
    ),
    "tanh": _Operation("{a}.tanh()", ("aten.tanh_backward({g}, {y})",), "{a}.tanh_()"),
    "sigmoid": _Operation("{a}.sigmoid()", ("aten.sigmoid_backward({g}, {y})",), "{a}.sigmoid_()"),
    "erf": _Operation(
        "{a}.erf()", (f"{{a}}.pow(2).neg_().exp_().mul_({2 / math.sqrt(math.pi)}).mul_({{g}})",), "{a}.erf_()"
    ),
    "cast": _Operation("{a}.to({n})", ("{g}",)),
}
OPERATIONS = frozenset(_OPERATIONS) - {"cast"}


def _dtype_under_autocast(step: Step, values: Sequence[Tensor]) -> torch.dtype:
    names = dict(zip("ab", (values[k] for k in step.values), strict=False))
    forward = _OPERATIONS[step.operation].forward.format(a="a", b="b", n=step.number)
    return eval(forward, names).dtype


def _with_casts(steps: Sequence[Step], x: Tensor) -> tuple[list[Step], list[torch.dtype]] | None:
    """The steps with the casts of the autocast state that is on as steps of their own, and the dtypes of all values.

    None for a cast that is not of an operation's only tensor.
    """
    done: list[Step] = []
    values = [x.detach().new_empty(0)]
    number_of = [0]  # of a value without casts: that with them

    def add(step: Step, dtype: torch.dtype) -> int:
        done.append(step)
        values.append(values[0].new_empty(0, dtype=dtype))
        return len(done)

    for step in steps:
        inputs = [number_of[k] for k in step.values]
        dtype = _dtype_under_autocast(step._replace(values=tuple(inputs)), values)
        if dtype != torch.result_type(values[inputs[0]], values[inputs[-1]]):
            if len(inputs) > 1:
                return None
            inputs = [add(Step("cast", (inputs[0],), dtype), dtype)]
        number_of.append(add(step._replace(values=tuple(inputs)), dtype))
    return done, [value.dtype for value in values]


class _Writer:
    """Writes the lines of the function: v0, v1, ... are the values, g0, g1, ... their gradients."""

    def __init__(self, steps: Sequence[Step], dtypes: Sequence[torch.dtype]) -> None:
        self.steps, self.dtypes = [*enumerate(steps, 1)], dtypes
        self.lines: list[str] = []
        self.read = self._read_backward()
        self.own: dict[int, bool] = {len(steps): False}  # gradients: whether nothing else has their memory

    def _read_backward(self) -> set[int]:
        """The values that backward formulas read."""
        found: set[int] = set()
        for nr, step in self.steps:
            text = "".join(_OPERATIONS[step.operation].backward)
            names = zip(("{a}", "{b}", "{y}"), (*step.values, *[None] * (2 - len(step.values)), nr), strict=True)
            found.update(value for name, value in names if name in text and value is not None)
        return found

    def _text(self, template: str, nr: int, step: Step) -> str:
        a, b = step.values[0], step.values[-1]
        return template.format(a=f"v{a}", b=f"v{b}", n=step.number, y=f"v{nr}", g=f"g{nr}")

    def forward(self) -> None:
        """What the backward formulas read, over values that nothing reads any more."""
        needed, last = {*self.read}, dict[int, int]()
        for nr, step in reversed(self.steps):
            for value in step.values if nr in needed else ():
                needed.add(value)
                last.setdefault(value, nr)
        for nr, step in self.steps:
            if nr not in needed:
                continue
            operation = _OPERATIONS[step.operation]
            done = [v for v in step.values if v > 0 and v not in self.read and last[v] == nr]
            in_place = operation.forward_in_place if done else ""
            self.lines.append(f"v{nr} = {self._text(in_place or operation.forward, nr, step)}")
            self.lines += [f"v{value} = None" for value in done]

    def backward(self) -> None:
        for nr, step in reversed(self.steps):
            operation = _OPERATIONS[step.operation]
            formulas = operation.backward
            if self.own[nr] and operation.backward_in_place:
                formulas = (operation.backward_in_place,)
            for value, formula in zip(step.values, formulas, strict=True):
                is_new = formula != "{g}" or (self.own[nr] and len(formulas) == 1)
                self._add(value, self._text(formula, nr, step), is_new, self.dtypes[nr])
            self.lines.append(f"v{nr} = g{nr} = None")

    def _add(self, value: int, gradient: str, is_new: bool, dtype: torch.dtype) -> None:
        """Adds a gradient of a value to those before it, which is the order of autograd."""
        if dtype != self.dtypes[value]:
            gradient, is_new = f"({gradient}).to({self.dtypes[value]})", True
        if value not in self.own:
            self.lines.append(f"g{value} = {gradient}")
            self.own[value] = is_new
            return
        self.lines.append(f"g{value}.add_({gradient})" if self.own[value] else f"g{value} = g{value} + {gradient}")
        self.own[value] = True


def _source(steps: Sequence[Step], dtypes: Sequence[torch.dtype]) -> str:
    """The gradient of x as a Python function."""
    writer = _Writer(steps, dtypes)
    writer.forward()
    writer.backward()
    return "\n    ".join((f"def gradient(v0, g{len(steps)}):", *writer.lines, "return g0\n"))


Gradient = Callable[[Tensor, Tensor], Tensor]
"""(x, gradient of the result) -> gradient of x."""


class Chain:
    """Operations one after another, the first of them on x; later ones on x and on results."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.gradients: dict[Any, Gradient | None] = {}

    def gradient(self, x: Tensor, autocast: torch.dtype | None) -> Gradient | None:
        """For an x like this, under the autocast state that is on. autocast: its dtype, or None for off."""
        key = x.dtype, x.device.type, autocast
        if key not in self.gradients:
            with torch.no_grad():
                found = _with_casts(self.steps, x) if x.is_floating_point() else None
            self.gradients[key] = None if found is None else _compiled(_source(*found))
        return self.gradients[key]


def _compiled(source: str) -> Gradient:
    names: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
    exec(source, names)
    return names["gradient"]
