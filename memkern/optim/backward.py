"""The step in the backward pass: each parameter is stepped when its gradient has arrived, and the gradient freed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .arrivals import arrivals_of, wait_for_offloaded
from .base import BlockwiseOptimizer
from .dtensor import shards
from .foreign import refuse_clipping
from .format import takes_8bit_state
from .muon import Muon


class StepInBackward(Optimizer):
    r"""An optimizer whose steps are taken inside ``backward()``, so that there is one gradient at a time.

    ::

        optimizer = memkern.optim.StepInBackward(memkern.optim.AdamW8bit, model.parameters(), lr=1e-4)
        loss.backward()        # steps each parameter when its gradient has arrived, and frees the gradient
        optimizer.step()       # nothing is left to do, so that the loop stays as it is
        optimizer.zero_grad()

    Args:
        optimizer_class: the optimizer, memkern's or torch.optim's.
        params: what it takes; tensors on one device.
        options: its options.

    The object is an instance of ``optimizer_class``, too: groups, schedulers, ``state_dict`` (the same) and hooks are
    its own. The result has every bit of the ordinary step's for all optimizers that step a parameter by its own
    gradient and state, as all of memkern's and torch.optim's elementwise ones do. A parameter that is used several
    times (tied weights) is stepped once, after its last use.

    Bytes: about two of the largest gradients exist at a time, and not all. Time: one call of the op for each parameter,
    and not one for all.

    The groups' options (lr and all others) count as they are in ``backward()``: ones that are set between
    ``backward()`` and ``step()`` count from the next ``backward()`` on.

    ``step()`` takes a closure, which is called once. A gradient that did not come from ``backward()``, because it was
    set by hand or its parameter needed none when it was added, is stepped and freed by ``step()``.

    Cannot work, and raises: a class whose step changes its groups, such as a counter of steps there (at the first one;
    HostOffload takes it), ``max_grad_norm`` (the norm of all gradients is known when all are there), a GradScaler
    (whether a step is skipped is too), a second ``backward()`` before ``step()`` (where its forward pass came before
    the first one, torch's error for weights that were modified in place), ``zero_grad()`` between ``backward()`` and
    ``step()`` (the step cannot be undone), optimizers whose step needs a closure (LBFGS), parameters on several devices
    (each has its own thread in the backward pass), and plain parameters in a job of several processes (whatever reduces
    their gradients, such as DistributedDataParallel, does so after the hooks). Cannot work and cannot be noticed:
    torch.nn.utils.clip_grad_norm_ after ``backward()``, which finds no gradients. A GradScaler is noticed at its first
    ``step()``, after one step on scaled gradients, and so is the clipping of transformers' Trainer and of Lightning.

    Raises:
        ValueError, TypeError: from ``optimizer_class`` for its options, and for what is said above.
        RuntimeError: in ``backward()``, ``step()`` or ``zero_grad()``, for what is said above.

    Sources: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (arXiv
    2306.09782); PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
    """

    optimizer_class: type[Optimizer]
    wraps_a_class = True
    frees_gradients = True
    clips_by_norm = False
    _is_restricted = False  # whether there are some parameters in place of all (_restricted_to)
    _is_deferring = False  # whether a thread may be in _restricted_to: groups are those of the pass's first gradient
    _step_supports_amp_scaling = True  # so that GradScaler leaves its grad_scale here, where step() refuses it

    def __new__(cls, optimizer_class: type[Optimizer], *args: Any, **options: Any) -> StepInBackward:
        check_class(optimizer_class)
        return _new(optimizer_class)

    def __init__(self, optimizer_class: type[Optimizer], params: Any, **options: Any) -> None:
        check_no_norm(options.get("max_grad_norm"))
        self._start()
        super().__init__(params, **options)

    def _start(self) -> None:
        self._hooks = ParameterHooks(self._step_one, waits=False)
        self._stepped: set[Tensor] = set()
        self._places: dict[Tensor, tuple[dict[str, Any], int]] = {}

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; raises before the group is added where its parameters are on another device."""
        super().add_param_group(param_group)
        try:
            self._hook_parameters()
        except ValueError:
            self.param_groups.pop()
            raise

    def _hook_parameters(self) -> None:
        """Hooks the parameters that need a gradient and have no hook yet."""
        params = self._parameters()
        devices = {p.device for p in params if p.requires_grad}
        if len(devices) > 1:
            raise ValueError(
                f"params must be on one device, got {', '.join(sorted(map(str, devices)))}: the backward pass has a "
                "thread for each; make an optimizer for each device"
            )
        self._hooks.follow(params)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # ---- some parameters in place of all

    @contextlib.contextmanager
    def _restricted_to(self, params: Sequence[Tensor]) -> Iterator[None]:
        """A ``with`` block in which the optimizer's groups have no other parameters than these.

        So a step takes as long as theirs, and other gradients, which were set by hand, wait for step().
        """
        groups = self.param_groups
        some: dict[int, tuple[dict[str, Any], list[Tensor], list[Tensor]]] = {}
        for p in params:
            place = self._place_of(p)
            assert place is not None
            some.setdefault(id(place[0]), (place[0], place[0]["params"], []))[2].append(p)
        try:
            self.param_groups, self._is_restricted = [group for group, _, _ in some.values()], True
            for group, _, own in some.values():
                group["params"] = own
            yield
        finally:
            self.param_groups, self._is_restricted = groups, False
            for group, all_params, _ in some.values():
                group["params"] = all_params

    def _place_of(self, p: Tensor) -> tuple[dict[str, Any], int] | None:
        """A parameter's group and its index there, by a map that is made again where lists have changed."""
        if self._is_deferring:
            return self._places.get(p)
        if (place := self._places.get(p)) is not None:
            params = place[0]["params"]
            if place[1] < len(params) and params[place[1]] is p:
                return place
        self._places = {q: (g, i) for g in self.param_groups for i, q in enumerate(g["params"])}
        return self._places.get(p)

    def _follow_groups(self) -> None:
        """Follows all groups of memkern's optimizers at the first gradient of a backward pass."""
        if not self._is_restricted:
            super()._follow_groups()  # type: ignore[misc]

    # ---- steps

    def _step_one(self, p: Tensor) -> None:
        """The hook: the step of one parameter, whose gradient is complete."""
        if self._place_of(p) is None:  # it has left the groups, and others may want its gradient
            self._hooks.remove(p)
            return
        check_first_gradient(p, self._stepped)
        check_not_reduced_later(p, StepInBackward, "use the optimizer without StepInBackward")
        first = not self._stepped
        self._stepped.add(p)
        try:
            if first and hasattr(super(), "_follow_groups"):
                self._follow_groups()
            if first:
                self._is_deferring = self._can_defer()
            arrivals = arrivals_of(p)
            if arrivals is None:
                wait_for_offloaded(p)
            elif self._is_deferring:
                arrivals.defer(self, self._step_some, p)
                return
            else:
                arrivals.wait()
            self._step_some([p])
        finally:
            if not self._is_deferring:
                p.grad = None

    def _can_defer(self) -> bool:
        """Whether a thread steps all parameters, whose gradients arrive on the host, and needs no other ranks.

        A step's collectives come between the backward pass's, in one order on all ranks.
        """
        return all(
            arrivals_of(p) is not None and reduction_of_step(self.optimizer_class, p, group) is None
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        )

    def _step_some(self, params: Sequence[Tensor]) -> None:
        """The step of these parameters, by their gradients."""
        with self._restricted_to(params):
            if steps_each_by_itself(self.optimizer_class):
                self._step_all()
                return
            before = _options_of(self.param_groups)
            self._step_all()
            if changed := _changed(before, _options_of(self.param_groups)):
                raise RuntimeError(
                    f"StepInBackward takes no {self.optimizer_class.__name__}, whose step changes {', '.join(changed)} "
                    "of its groups: each parameter would count as a step. Use it as it is, or with HostOffload; a "
                    f"parameter of shape {tuple(params[0].shape)} has been stepped"
                )

    def _step_all(self) -> None:
        """The optimizer's own step of every parameter that has a gradient, without its hooks."""
        for group in self.param_groups:
            check_no_norm(group.get("max_grad_norm"))
        without_hooks(super().step)()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step that ``backward()`` has taken. ``closure``: computes the loss with gradients; called once."""
        refuse_scaler(self, "use bfloat16, or the optimizer without StepInBackward")
        refuse_clipping(self)
        self._hooks.check_newest()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._is_deferring = False
        left = [p for p in self._parameters() if p.grad is not None]
        if left:
            self._step_all()
        for p in left:
            p.grad = None
        self._stepped.clear()
        self._places.clear()  # groups may change until the next pass
        self._hook_parameters()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees gradients that were set by hand; others are free already."""
        check_not_stepped(self._stepped)
        super().zero_grad(set_to_none)

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_hooks" not in vars(self):  # a copy
            self._start()
        self._hook_parameters()

    def __reduce__(self) -> Any:
        return _new, (self.optimizer_class,), self.__getstate__()


_HOOKS: dict[int, list[weakref.ref[ParameterHooks]]] = {}
"""The hooks on each parameter, the oldest first, by its id: weak references forbid torch.utils.swap_tensors."""


class ParameterHooks:
    """Calls a method with each parameter whose gradient is complete, once per backward pass.

    Of several optimizers over one parameter the one that was made last has the gradient, as long as it is alive: a
    scheduler may keep an older one.
    """

    def __init__(self, method: Callable[[Tensor], None], waits: bool = True) -> None:
        self.waits = waits  # for gradients that arrive on the host
        # Weak, so that the parameters do not keep the optimizer: one that is dropped must not step any more.
        self.method = weakref.WeakMethod(method)
        self.handles: dict[Tensor, Any] = {}
        self.newer: weakref.ref[ParameterHooks] | None = None  # of an optimizer that has taken a parameter over

    def follow(self, params: Iterable[Tensor]) -> None:
        """Hooks those of ``params`` that need a gradient, and removes the hooks of others."""
        now = [*params]
        if len(self.handles) != len(now) or any(p not in self.handles for p in now):
            for p in {*self.handles} - {*now}:
                self.remove(p)
            for p in now:
                if p.requires_grad and p not in self.handles:
                    self._add(p)

    def remove(self, p: Tensor) -> None:
        self.handles.pop(p).remove()

    def _add(self, p: Tensor) -> None:
        own = weakref.ref(self)

        def hook(p: Tensor) -> None:
            hooks = own()
            if hooks is not None and (method := hooks.method()) is not None and hooks._is_newest(p):
                method(p)

        older = [hooks for ref in _HOOKS.get(id(p), ()) if (hooks := _hooks_of(ref, p)) is not None]
        for hooks in older:
            hooks.newer = own
        if (arrivals := arrivals_of(p)) is None:
            self.handles[p] = p.register_post_accumulate_grad_hook(hook)
        else:
            self.handles[p] = arrivals.register(p, hook, self.waits)
        _HOOKS[id(p)] = [*map(weakref.ref, older), own]

    def _is_newest(self, p: Tensor) -> bool:
        return next(x for ref in reversed(_HOOKS[id(p)]) if (x := _hooks_of(ref, p)) is not None) is self

    def check_newest(self) -> None:
        """Raises RuntimeError where an optimizer that was made later has the gradients."""
        newer = None if self.newer is None else self.newer()
        optimizer = None if newer is None else getattr(newer.method(), "__self__", None)
        if optimizer is not None:
            raise RuntimeError(
                f"another optimizer, a {type(optimizer).__name__}, was made of the same parameters later, and takes "
                "their gradients in the backward pass: step that one, or drop it"
            )


def _hooks_of(ref: weakref.ref[ParameterHooks], p: Tensor) -> ParameterHooks | None:
    """An optimizer's hooks, if it is alive and has one on p."""
    hooks = ref()
    return hooks if hooks is not None and hooks.method() is not None and p in hooks.handles else None


def check_class(optimizer_class: Any) -> None:
    """Raises TypeError unless it is a class of optimizers whose step needs the gradients once."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a class of optimizers, got {optimizer_class!r}")
    if getattr(optimizer_class, "wraps_a_class", False):
        raise TypeError(f"optimizer_class must be a plain one, got {optimizer_class.__name__}, which has one inside")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"optimizer_class must be one whose step() needs no closure, got {optimizer_class.__name__}, which "
            "computes the gradients more than once a step"
        )


def steps_each_by_itself(optimizer_class: Any) -> bool:
    """Whether a class's ``step`` is memkern's or torch.optim's: by parameter, from options that it does not change.

    Others may keep in their groups what a step changes (a counter, Prodigy's d): then one call is one step.
    """
    return optimizer_class.step.__module__.startswith(("memkern.optim.", "torch.optim."))


def _options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """The groups' options as they are now, each as a list of numbers, tensors and others."""
    return [
        {
            key: [x.clone() if isinstance(x, Tensor) else x for x in tree_leaves(value)]
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def _changed(before: Sequence[dict[str, list[Any]]], after: Sequence[dict[str, list[Any]]]) -> list[str]:
    """The names of options that differ."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.equal(x, y)
        return x is y or bool(torch.as_tensor(x == y).all())

    def equal(xs: list[Any] | None, ys: list[Any] | None) -> bool:
        return xs is not None and ys is not None and len(xs) == len(ys) and all(map(same, xs, ys))

    pairs = zip(before, after, strict=True)
    return sorted({key for a, b in pairs for key in a | b if not equal(a.get(key), b.get(key))})


def check_no_norm(max_grad_norm: float | None) -> None:
    """Raises ValueError for clipping, which cannot be done where steps are taken in the backward pass."""
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm must be None, got {max_grad_norm!r}: the norm of all gradients is known after the backward "
            "pass, and the step is taken inside it"
        )


def check_first_gradient(p: Tensor, stepped: set[Tensor]) -> None:
    """Raises RuntimeError, and frees the gradient, where the parameter was stepped since the last ``step()``."""
    if p in stepped:
        p.grad = None
        raise RuntimeError(
            f"a second gradient of a parameter of shape {tuple(p.shape)} before step(): each backward() steps the "
            "parameters, so that a step cannot wait for more gradients (accumulation, reentrant checkpoints that share "
            "a parameter); call step() after each backward()"
        )


def check_not_stepped(stepped: set[Tensor]) -> None:
    """For ``zero_grad()``: raises RuntimeError where gradients were used that it should discard."""
    if stepped:
        raise RuntimeError(
            "zero_grad() between backward() and step(): backward() has taken the step on these gradients, which cannot "
            "be undone; call step() first"
        )


def without_hooks(step: Callable[[], Any]) -> Callable[[], Any]:
    """An optimizer's bound ``step`` without its hooks, which belong to the step that the loop calls."""
    if not getattr(step, "hooked", False):
        return step
    bound: Any = step  # torch wraps the step of each class that has objects
    return functools.partial(bound.__wrapped__, bound.__self__)


def refuse_scaler(optimizer: Optimizer, cure: str) -> None:
    """Raises RuntimeError where a GradScaler has called step()."""
    given = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
    if any(x is not None for x in given):
        raise RuntimeError(
            f"a GradScaler cannot be used with this {type(optimizer).__name__}: whether a gradient is not finite, and "
            f"the step to be skipped, is known after the backward pass, and the gradients are gone then; {cure}"
        )


def check_not_reduced_later(p: Tensor, cls: type, cure: str) -> None:
    """Raises RuntimeError for a plain parameter in a job of several processes. ``cure``: what else to do."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    if not isinstance(p, distributed.tensor.DTensor):
        raise RuntimeError(
            f"{cls.__name__} takes and frees the gradient of a plain parameter, here of shape {tuple(p.shape)}, before "
            f"the {distributed.get_world_size()} processes of this job can reduce it; shard the model with "
            f"fully_shard, or {cure}"
        )


_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # of torch: steps that need no other ranks


def reduction_of_step(optimizer_class: type[Optimizer], p: Tensor, group: dict[str, Any]) -> str | None:
    """Why a step of a parameter, by its group's options, needs other ranks; None where it does not."""
    if not p.requires_grad or shards.ranks_of(p) is None:
        return None
    if not issubclass(optimizer_class, BlockwiseOptimizer):
        return None if optimizer_class in _ELEMENTWISE else "is not known to need no other ranks"
    if optimizer_class.op.has_trust_ratios:
        return "needs norms of whole layers"
    if issubclass(optimizer_class, Muon) and group.get("algorithm", "muon") == "muon":
        return "needs whole matrices"
    given = {**optimizer_class.option_defaults, **group}
    cut = takes_8bit_state(p, given) and shards.cuts_blocks(p, given["block_size"])
    return "needs the largest values of blocks that other ranks have elements of" if cut else None


@functools.cache
def _class_for(optimizer_class: Any) -> type[StepInBackward]:
    """The class of the objects: steps in the backward pass, and else is ``optimizer_class``."""
    name = f"{StepInBackward.__name__}({optimizer_class.__name__})"
    return type(name, (StepInBackward, optimizer_class), {"optimizer_class": optimizer_class})


def _new(optimizer_class: type[Optimizer]) -> StepInBackward:
    """An empty object, for pickle and copy."""
    return object.__new__(_class_for(optimizer_class))  # type: ignore[arg-type]
