"""Steps each parameter inside ``backward()``, when its gradient has arrived, and frees the gradient."""

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
        optimizer_class: the class of the optimizer, memkern's or torch.optim's.
        params: the parameters, tensors on one device, as ``optimizer_class`` takes them.
        options: the options of ``optimizer_class``.

    The object is an instance of ``optimizer_class``, too: it has the class's groups, schedulers, hooks and
    ``state_dict``. The result has the bits of the ordinary step for all optimizers that step a parameter by its own
    gradient and state, such as memkern's and torch.optim's elementwise ones. A parameter that is used several times
    (tied weights) is stepped once, after its last use.

    Bytes: about two of the largest gradients exist at a time in place of all. Time: one call of the op for each
    parameter in place of one for all.

    ``backward()`` reads the groups' options (lr and all others): one that is set between ``backward()`` and ``step()``
    counts from the next ``backward()`` on.

    ``step()`` takes a closure, which is called once. A gradient that did not come from ``backward()``, because it was
    set by hand or its parameter needed none when it was added, is stepped and freed by ``step()``.

    Cannot work, and raises: a class whose step changes its groups, such as a counter of steps there (at the first one;
    HostOffload takes it), ``max_grad_norm`` (the norm of all gradients is known when all are there), a GradScaler
    (so is whether a step is skipped), a second ``backward()`` before ``step()`` (where its forward pass came before
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
    wraps_a_class = True  # so that no other wrapper takes the class
    frees_gradients = True  # in the backward pass
    clips_by_norm = False  # supports no max_grad_norm
    _is_restricted = False  # whether the groups have only some of the parameters now (_restricted_to)
    _is_deferring = False  # whether a thread steps, which may restrict the groups while others would read them
    _step_supports_amp_scaling = True  # so that GradScaler leaves its grad_scale here, where step() refuses it

    def __new__(cls, optimizer_class: type[Optimizer], *args: Any, **options: Any) -> StepInBackward:
        check_class(optimizer_class)
        return _new(optimizer_class)

    def __init__(self, optimizer_class: type[Optimizer], params: Any, **options: Any) -> None:
        check_no_norm(options.get("max_grad_norm"))
        self._start()
        super().__init__(params, **options)

    def _start(self) -> None:
        """Makes the attributes that copies and pickles do not have."""
        self._hooks = ParameterHooks(self._step_one, waits=False)
        self._stepped: set[Tensor] = set()  # parameters that were stepped since the last step()
        self._group_of: dict[Tensor, dict[str, Any]] = {}  # the group of each parameter in this backward pass

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

        A step then reads these gradients alone, and leaves those that were set by hand to step().
        """
        groups = self.param_groups
        by_group: dict[int, tuple[dict[str, Any], list[Tensor], list[Tensor]]] = {}  # group, all params, chosen ones
        for p in params:
            group = self._group_of[p]
            by_group.setdefault(id(group), (group, group["params"], []))[2].append(p)
        try:
            self.param_groups, self._is_restricted = [group for group, _, _ in by_group.values()], True
            for group, _, chosen in by_group.values():
                group["params"] = chosen
            yield
        finally:
            self.param_groups, self._is_restricted = groups, False
            for group, all_params, _ in by_group.values():
                group["params"] = all_params

    def _follow_groups(self) -> None:
        """memkern's optimizers follow all of their groups at the first gradient of a backward pass."""
        if not self._is_restricted:
            super()._follow_groups()  # type: ignore[misc]

    # ---- steps

    def _step_one(self, p: Tensor) -> None:
        """The hook: the step of one parameter, whose gradient is complete."""
        first = not self._stepped
        if first:
            self._group_of = {q: group for group in self.param_groups for q in group["params"]}
        if p not in self._group_of:  # it has left the groups, and others may want its gradient
            self._hooks.remove(p)
            return
        if p in self._stepped:
            p.grad = None
            raise RuntimeError(
                f"a second gradient of a parameter of shape {tuple(p.shape)} before step(): each backward() steps the "
                "parameters, so that a step cannot wait for more gradients (accumulation, reentrant checkpoints that "
                "share a parameter); call step() after each backward()"
            )
        check_not_reduced_later(p, StepInBackward, "use the optimizer without StepInBackward")
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
            if not self._is_deferring:  # else the thread that steps frees the gradient
                p.grad = None

    def _can_defer(self) -> bool:
        """Whether a thread can step all parameters: their gradients arrive on the host and no step needs other ranks.

        A step's collectives must come between the backward pass's in one order on all ranks, which a thread breaks.
        """
        return all(
            arrivals_of(p) is not None and why_ranks_are_needed(self.optimizer_class, p, group) is None
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        )

    def _step_some(self, params: Sequence[Tensor]) -> None:
        """Steps these parameters alone."""
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
        """Calls the optimizer's own ``step``, of every parameter that has a gradient, without the hooks of ``step``."""
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
        unstepped = [p for p in self._parameters() if p.grad is not None]
        if unstepped:
            self._step_all()
        for p in unstepped:
            p.grad = None
        self._stepped.clear()
        self._group_of.clear()
        self._hook_parameters()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees gradients that were set by hand; ``backward()`` has freed all others."""
        if self._stepped:
            raise RuntimeError(
                "zero_grad() between backward() and step(): backward() has taken the step on these gradients, which "
                "cannot be undone; call step() first"
            )
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
"""By a parameter's id, its hooks, the oldest first. Weak references to it would forbid torch.utils.swap_tensors."""


class ParameterHooks:
    """Calls a method with each parameter whose gradient is complete, once per backward pass.

    Of several optimizers over one parameter, the newest that is alive gets the gradient: a scheduler may keep an older
    one alive.
    """

    def __init__(self, method: Callable[[Tensor], None], waits: bool = True) -> None:
        self.waits = waits  # whether the method is called after the gradient's copy to the host is complete
        # Weak, so that the parameters do not keep the optimizer alive: a dropped optimizer must not step.
        self.method = weakref.WeakMethod(method)
        self.handles: dict[Tensor, Any] = {}
        self.newer: weakref.ref[ParameterHooks] | None = None  # of an optimizer that took a parameter over

    def follow(self, params: Iterable[Tensor]) -> None:
        """Hooks those of ``params`` that need a gradient, and removes the hooks of all other parameters."""
        wanted = [*params]
        if len(self.handles) != len(wanted) or any(p not in self.handles for p in wanted):
            for p in {*self.handles} - {*wanted}:
                self.remove(p)
            for p in wanted:
                if p.requires_grad and p not in self.handles:
                    self._add(p)

    def remove(self, p: Tensor) -> None:
        """Removes a parameter's hook."""
        self.handles.pop(p).remove()

    def _add(self, p: Tensor) -> None:
        self_ref = weakref.ref(self)

        def hook(p: Tensor) -> None:
            hooks = self_ref()
            if hooks is not None and (method := hooks.method()) is not None and hooks._is_newest(p):
                method(p)

        older = [*filter(None, (_hooks_of(ref, p) for ref in _HOOKS.get(id(p), ())))]
        for hooks in older:
            hooks.newer = self_ref
        if (arrivals := arrivals_of(p)) is None:
            self.handles[p] = p.register_post_accumulate_grad_hook(hook)
        else:
            self.handles[p] = arrivals.register(p, hook, self.waits)
        _HOOKS[id(p)] = [*map(weakref.ref, older), self_ref]

    def _is_newest(self, p: Tensor) -> bool:
        return next(filter(None, (_hooks_of(ref, p) for ref in reversed(_HOOKS[id(p)])))) is self

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
    """The hooks of an optimizer that is alive and has one on p; None otherwise."""
    hooks = ref()
    return hooks if hooks is not None and hooks.method() is not None and p in hooks.handles else None


def check_class(optimizer_class: Any) -> None:
    """Raises TypeError unless it is a class of optimizers, wraps no other, and computes gradients once a step."""
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
    """Whether a class's ``step`` may be called for some parameters at a time: memkern's and torch.optim's may.

    The ``step`` of others may change options of their groups (a counter, Prodigy's d), so that each call counts.
    """
    return optimizer_class.step.__module__.startswith(("memkern.optim.", "torch.optim."))


def _options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """The groups' options as they are now, each flattened to a list, with copies of tensors."""
    return [
        {
            key: [x.clone() if isinstance(x, Tensor) else x for x in tree_leaves(value)]
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def _changed(before: Sequence[dict[str, list[Any]]], after: Sequence[dict[str, list[Any]]]) -> list[str]:
    """The names of the options that differ."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.equal(x, y)
        return x is y or bool(torch.as_tensor(x == y).all())

    def equal(xs: list[Any] | None, ys: list[Any] | None) -> bool:
        return xs is not None and ys is not None and len(xs) == len(ys) and all(map(same, xs, ys))

    pairs = zip(before, after, strict=True)
    return sorted({key for old, new in pairs for key in old | new if not equal(old.get(key), new.get(key))})


def check_no_norm(max_grad_norm: float | None) -> None:
    """Raises ValueError for clipping, which cannot be done where steps are taken in the backward pass."""
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm must be None, got {max_grad_norm!r}: the norm of all gradients is known after the backward "
            "pass, and the step is taken inside it"
        )


def without_hooks(step: Callable[[], Any]) -> Callable[[], Any]:
    """An optimizer's bound ``step`` without its hooks, which belong to the step that the loop calls."""
    if not getattr(step, "hooked", False):
        return step
    bound: Any = step  # with hooks, as torch wraps the step of each class that has objects
    return functools.partial(bound.__wrapped__, bound.__self__)


def refuse_scaler(optimizer: Optimizer, cure: str) -> None:
    """Raises RuntimeError where a GradScaler has called step(). ``cure``: what to do instead."""
    given = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
    if any(x is not None for x in given):
        raise RuntimeError(
            f"a GradScaler cannot be used with this {type(optimizer).__name__}: whether a gradient is not finite, and "
            f"the step to be skipped, is known after the backward pass, and the gradients are gone then; {cure}"
        )


def check_not_reduced_later(p: Tensor, cls: type, cure: str) -> None:
    """Raises RuntimeError for a plain parameter in a job of several processes. ``cure``: what to do instead."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    if not isinstance(p, distributed.tensor.DTensor):
        raise RuntimeError(
            f"{cls.__name__} takes and frees the gradient of a plain parameter, here of shape {tuple(p.shape)}, before "
            f"the {distributed.get_world_size()} processes of this job can reduce it; shard the model with "
            f"fully_shard, or {cure}"
        )


_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # torch's classes whose steps need no other ranks


def why_ranks_are_needed(optimizer_class: type[Optimizer], p: Tensor, group: dict[str, Any]) -> str | None:
    """Why the step of a parameter needs other ranks, with its group's options; None where it needs none."""
    if not p.requires_grad or shards.ranks_of(p) is None:
        return None
    if not issubclass(optimizer_class, BlockwiseOptimizer):
        return None if optimizer_class in _ELEMENTWISE else "is not known to need no other ranks"
    if optimizer_class.op.has_trust_ratios:
        return "needs norms of whole layers"
    if issubclass(optimizer_class, Muon) and group.get("algorithm", "muon") == "muon":
        return "needs whole matrices"
    options = {**optimizer_class.option_defaults, **group}
    cut = takes_8bit_state(p, options) and shards.cuts_blocks(p, options["block_size"])
    return "needs the largest values of blocks that other ranks have elements of" if cut else None


@functools.cache
def _class_for(optimizer_class: Any) -> type[StepInBackward]:
    """The subclass of StepInBackward and ``optimizer_class`` that an object has."""
    name = f"{StepInBackward.__name__}({optimizer_class.__name__})"
    return type(name, (StepInBackward, optimizer_class), {"optimizer_class": optimizer_class})


def _new(optimizer_class: type[Optimizer]) -> StepInBackward:
    """An empty object, for pickle and copy."""
    return object.__new__(_class_for(optimizer_class))  # type: ignore[arg-type]
