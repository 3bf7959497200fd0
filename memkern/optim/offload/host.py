"""Optimizer states, and if wanted fp32 weights and gradients, on the host; the step is taken there by the CPU."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import loading
from ..backward import (
    ParameterHooks,
    check_class,
    check_first_gradient,
    check_no_norm,
    check_not_reduced_later,
    check_not_stepped,
    refuse_scaler,
    steps_each_by_itself,
    without_hooks,
)
from ..base import BlockwiseOptimizer
from ..checks import check_gradient
from ..dtensor.order import Order
from ..dtensor.shards import local, placed
from ..foreign import lightning_asks, refuse_clipping
from ..muon import Muon
from .host_weights import HostWeights
from .transfers import transfers_of
from .weight import Weight, check_no_reductions, check_options, has_gradient
from .worker import Worker

HOST_WEIGHT = "host_weight"
"""The entry of a parameter's state in ``state_dict()``, where the inner optimizer's state has no weights."""
_TAKES_OTHER_GRADIENTS = hasattr(Tensor, "grad_dtype")  # torch 2.11: p.grad may have another dtype than p
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback  # as fully_shard does
_COPIED = ("_inner", "_class", "_options", "_hooks_gradients", "_steps_in_backward", "_weights")


class HostOffload(Optimizer):
    r"""An optimizer whose states are on the host, and whose steps the CPU takes.

    ::

        model.to("cuda", torch.bfloat16)
        optimizer = memkern.optim.HostOffload(memkern.optim.AdamW8bit, model.parameters(), lr=1e-4)
        # the loop is as always: loss.backward(); optimizer.step(); optimizer.zero_grad()

    For each parameter p on the device the host has a weight in ``host_dtype``. A step copies the gradient to the host,
    steps the host's weight there with the CPU's kernels, and copies it back to p, rounded to p's dtype. The three
    overlap: while one bucket of tensors is stepped, gradients of the next ones come and weights of the last ones go.

    Args:
        optimizer_class: the optimizer that the host runs, memkern's or torch.optim's.
        params: parameters of the model, on any device.
        host_dtype: dtype of the weights on the host, default torch.float32, so that a half-precision model has an fp32
            model on the host. None: each parameter's own. A parameter of 4 or 8 bytes keeps its dtype. For bf16
            parameters and memkern's optimizers this is their ``master_weights="bf16+16"``, which has the bits of fp32;
            where ``master_weights`` or ``stochastic_rounding`` is given, host_dtype is None.
        offload_gradients: each gradient goes to the host when ``backward()`` has computed it and is freed on the
            device; gradients of further ``backward()`` calls are added there, in the parameter's dtype. Default False.
        step_in_backward: in addition the CPU steps as soon as gradients arrive, in a thread of its own beside the
            backward pass. There is one ``backward()`` to a step then. Default False.
        device_state_bytes: the states (and host_dtype weights) of the first parameters stay on the device and are
            stepped there, up to so many bytes; None: all of them, until the device has no memory for one that is made,
            which then goes to the host with all that come after it. Default 0.
        options: the options of ``optimizer_class``. ``max_grad_norm`` is the norm of all gradients, and makes a step
            wait for all of them.

    | | default | ``offload_gradients`` | ``step_in_backward`` |
    |---|---|---|---|
    | gradients on the device | all, until ``zero_grad()`` | those on their way | those on their way |
    | the transfer of gradients overlaps | the step | the backward pass | the backward pass |
    | the CPU's step overlaps | transfers | transfers of weights | transfers and the backward pass |
    | accumulation | on the device | on the host | raises |
    | clipping | by max_grad_norm or by torch's functions | by max_grad_norm; a framework's raises | raises |
    | GradScaler | yes | raises | raises |

    ``step()`` returns when the host is done; copies of weights may be under way, and the device's current stream waits
    for them. ``offload_gradients`` and ``step_in_backward`` consume a gradient in ``step()``.

    With ``step_in_backward`` the groups' options (lr and all others) count as they are when ``backward()`` begins to
    deliver gradients. Ones that are set between ``backward()`` and ``step()`` count from the next ``backward()`` on,
    and in ``step()`` for gradients that were set by hand. ``backward()`` returns when its steps are taken, and raises
    what they raised. A second one before ``step()`` raises at the first gradient that comes again, or, where its
    forward pass was before the steps, torch's error for weights that were modified in place.

    It is a torch.optim.Optimizer of the model's parameters, and reads its groups and states as they are at the step:
    lists may be assigned, extended or shortened. What the step changes in groups (some classes count steps there) is
    changed here, too; a class whose ``step`` is neither memkern's nor torch.optim's takes all gradients in one call.

    ``state_dict()`` is that of ``optimizer_class``, which can load it. What the host knows of a weight beyond the
    model's bits is in its state as ``weight_error``, or as ``host_weight``, the fp32 weight, where the optimizer is not
    memkern's or the model is fp16. A step goes on from the model's weights, whoever has written them (a state_dict that
    it loads, an edit under no_grad or of ``p.data``): an error is relative to the weight that is there, an fp32 weight
    is used where it rounds to it. On the CPU nothing is copied that the CPU can read where it is.

    Of DTensors (fully_shard, HSDP, tensor parallelism) each rank has its shards on its host: states and host weights
    are DTensors of the same mesh and placements, which torch.distributed.checkpoint saves and reshards. Norms
    (max_grad_norm, LAMB, LARS) and Muon's matrices are reduced and exchanged on the mesh's device, whose process group
    is enough. The result has every bit of the optimizer without HostOffload. ``device_state_bytes`` is each rank's.

    Bytes on the device: the model, and with a gradient offloaded its largest few gradients. On the host, per
    parameter of 2 bytes: 4 (weight), 2 to 6 (buffers of the transfers) and the states. Over the link per step: a
    gradient and a weight down and a weight up, in the parameter's dtype. Buffers and weights that are transferred are
    pinned; states are never transferred and are not.

    Raises:
        ValueError, TypeError: from ``optimizer_class``; an option of another type; with step_in_backward max_grad_norm,
            and DTensors whose step needs other ranks: its thread's collectives and those of the backward pass would
            come in another order on each rank.
        RuntimeError: in ``backward()``, ``step()`` or ``zero_grad()``: what the table says raises.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv 2101.06840).
    """

    wraps_a_class = True

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients leave the device in the backward pass, so that nobody else can clip them."""
        return self._hooks_gradients

    @property
    def clips_by_norm(self) -> bool:
        """Whether ``max_grad_norm`` can be given."""
        return not self._steps_in_backward

    _inner: Optimizer  # the worker's while it steps: others take ``inner``
    _transfers_of = staticmethod(transfers_of)

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Any,
        *,
        host_dtype: torch.dtype | None = torch.float32,
        offload_gradients: bool = False,
        step_in_backward: bool = False,
        device_state_bytes: int | None = 0,
        **options: Any,
    ) -> None:
        check_class(optimizer_class)
        check_options(host_dtype, device_state_bytes)
        if step_in_backward:
            check_no_norm(options.get("max_grad_norm"))
        self._class, self._options = optimizer_class, options
        self._hooks_gradients = offload_gradients or step_in_backward
        self._steps_in_backward = step_in_backward
        self._weights = HostWeights(optimizer_class, options, host_dtype, device_state_bytes)
        self._weights.transfers_of = self._transfers_of
        self._start()
        super().__init__(params, {})

    def _start(self) -> None:
        """Makes what is not copied or pickled."""
        self._worker = Worker()
        self._copies: list[tuple[Weight, Any]] = []  # of weights to the device, with their events
        self._arrived: dict[int, list[Weight]] = {}  # by bucket, while it waits for the rest of its gradients
        self._stepped: set[Tensor] = set()  # in the backward pass, since the last step()
        self._takes = False  # gradients of this step: the groups have been followed
        self._lock = threading.Lock()  # each device has its own thread in the backward pass
        self._hooks = ParameterHooks(self._take_in_backward)

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the host's weights, with the groups' options, after the steps that ``backward()`` began."""
        self._finish_backward()
        self._hand_over()
        return self._inner

    # ---- groups and states, which are the inner optimizer's during a step

    def _hand_over(self) -> None:
        """Gives the inner optimizer the groups and states as they are now, with the host's weights for parameters."""
        weights, groups, inner = self._weights, self.param_groups, self._inner.param_groups
        sizes = [[len(group["params"]) for group in of_one] for of_one in (groups, inner)]
        changed = sizes[0] != sizes[1] or not weights.are_of(groups)
        if changed:
            weights.follow_lists(groups)
            inner += ({} for _ in groups[len(inner) :])
            del inner[len(groups) :]
        for group, own in zip(groups, inner, strict=True):
            params = [weights[p].host_param for p in group["params"]] if changed else own["params"]
            options = {key: x for key, x in group.items() if key != "params"}
            own.clear()
            # Between backward() and step() a schedule may fill tensors in place.
            own.update(copy.deepcopy(options) if self._steps_in_backward else options, params=params)
        states, own_states = self.state, self._inner.state
        same = len(states) == len(own_states) and all(map(operator.is_, states.values(), own_states.values()))
        if changed or not same:
            own_states.clear()
            own_states.update((weights.host_param_of(p), x) for p, x in states.items())
        if changed:
            self._make_buckets()
            self._hook_parameters()

    def _hand_back(self) -> None:
        """Takes options and states as the inner optimizer has them now: ``state[p]`` is its own dict."""
        for own, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(own, params=params)
        self._weights.give_states(self._inner.state, self.state)

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's, and the inner optimizer's checks."""
        self._finish_backward()
        if self.param_groups:
            self._hand_over()
        given = set(param_group)  # before torch.optim adds the defaults
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self._weights.are_in_states(group):
            group["master_weights"] = "bf16+16"  # fp32's bits
            given.add("master_weights")
        made: list[Weight] = []
        try:
            if self._steps_in_backward:
                check_no_reductions(self._class, group["params"], {**self._options, **group})
            made += (self._weights.new(p, group) for p in group["params"])
            host_params: list[Any] = [w.host_param for w in made]
            if "param_names" in group:
                host_params = [*zip(group["param_names"], host_params, strict=True)]
            # What the group was not given, the inner optimizer's class decides or asks for.
            options = {k: x for k, x in group.items() if k in given - {"params", "param_names"}}
            if len(self.param_groups) == 1:
                self._inner = self._class([{"params": host_params, **options}], **self._options)
            else:
                self._inner.add_param_group({"params": host_params, **options})
        except BaseException:
            self.param_groups.pop()
            raise
        self.defaults = self._inner.defaults
        self._weights.add(made)
        self._hand_back()
        self._make_buckets()
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        if self._hooks_gradients:
            self._hooks.follow(w.p for w in self._weights.values() if not w.resident)

    def _make_buckets(self) -> None:
        self._is_clipping = self.defaults.get("max_grad_norm") is not None
        at_once = self._is_clipping or not steps_each_by_itself(self._class)
        self._weights.make_buckets(at_once, Order(self.param_groups))

    # ---- gradients

    def _take(self, w: Weight) -> None:
        """Begins the copy of a gradient to the host, or takes it where it is; adds to one that came before."""
        self._worker.join_addition()
        if add := w.take(self._weights.transfers(w.p)):
            self._worker.add(add)
        if self._hooks_gradients:
            w.p.grad = None

    def _take_in_backward(self, p: Tensor) -> None:
        """The hook of a parameter whose gradient is complete."""
        check_not_reduced_later(p, HostOffload, "leave offload_gradients and step_in_backward False")
        with self._lock:
            if self._steps_in_backward:
                check_first_gradient(p, self._stepped)
                if not self._stepped:
                    self._finish_backward()  # of one that was interrupted
                    for group in self.param_groups:
                        check_no_reductions(self._class, group["params"], group)
                    self._follow()
                    _at_end_of_backward(self._finish_backward)  # who reads weights then reads stepped ones
            elif not self._takes:
                self._hand_over()
                self._takes = True
            if (w := self._weights.get(p)) is None:  # it has left the groups, and others may want its gradient
                return
            if self._steps_in_backward:
                self._stepped.add(p)
                w.fetch(self._weights.transfers(p))
            self._take(w)
            if self._steps_in_backward:
                number = self._weights.bucket_of[p]
                arrived = self._arrived.setdefault(number, [])
                arrived.append(w)
                if len(arrived) == len(self._weights.buckets[number]):
                    self._worker.step(self._step_bucket, self._arrived.pop(number))

    def _finish_backward(self) -> None:
        """Ends the steps that ``backward()`` began, by the options that it began with. Raises what they raised.

        The worker steps the inner optimizer until then, so everything that another thread does with it comes after.
        """
        steps = self._worker.join_steps()
        rest = [w for of_bucket in self._arrived.values() for w in of_bucket]
        self._arrived.clear()
        try:
            for future in steps:
                future.result()
            if rest:
                self._step_bucket(rest)
            if steps or rest:
                self._weights.wait_for_copies(self._copies)
                self._hand_back()
        except BaseException:
            self._forget_gradients()
            raise

    def _forget_gradients(self) -> None:
        self._takes = False
        self._stepped.clear()
        self._arrived.clear()
        for w in self._weights.values():
            w.gradient = None

    # ---- steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the host. ``closure``: recomputes the loss with gradients, and its value is returned.

        Raises:
            RuntimeError: a GradScaler's step where gradients were offloaded; what the inner optimizer raises.
            ValueError: transformers' Trainer or Lightning would clip gradients that were offloaded.
        """
        if self._hooks_gradients:
            refuse_scaler(self, "leave offload_gradients and step_in_backward False")
            refuse_clipping(self)
            self._hooks.check_newest()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_backward()
        if is_left := not self._steps_in_backward or any(map(has_gradient, self._weights.values())):
            self._follow()
        self._hook_parameters()
        self._scale_inner()
        try:
            self._step_buckets()
        finally:
            self._scale_inner(False)
            self._forget_gradients()
            self._weights.wait_for_copies(self._copies)
            self._copies.clear()
            if is_left:
                self._hand_back()
        return loss

    def _follow(self) -> None:
        """Follows what has changed in groups and parameters, before the first bucket is stepped."""
        self._hand_over()
        self._thaw()
        self._weights.follow_memory()
        if isinstance(self._inner, BlockwiseOptimizer):
            if self._steps_in_backward:
                for group in self.param_groups:
                    check_no_norm(group["max_grad_norm"])
            self._inner._follow_groups()
            if self._is_clipping != (self.defaults["max_grad_norm"] is not None):
                self._make_buckets()

    def _thaw(self) -> None:
        """Makes host weights of parameters that were frozen when they were added."""
        if not (thawed := self._weights.thawed()):
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p in thawed:
                    if self._steps_in_backward:
                        check_no_reductions(self._class, [p], group)
                    self._weights.thaw(p, group, self._inner)
        self._make_buckets()

    def _step_buckets(self) -> None:
        """Steps what has a gradient. The gradients of a bucket are on their way while the one before is stepped."""
        buckets = [some for bucket in self._weights.buckets if (some := [*filter(has_gradient, bucket)])]
        ready = [w for bucket in buckets for w in bucket]
        if isinstance(self._inner, BlockwiseOptimizer):  # before the first bucket is changed
            for p in (w.p for w in ready):
                if p.grad is not None:
                    check_gradient(p, p.grad)
        if ready and not any(w.separate or w.resident for w in ready):
            buckets = [ready]  # nothing is transferred: one call, as in memory
        for i, bucket in enumerate(buckets):
            for ahead in buckets[i and i + 1 : i + 2]:
                for w in ahead:
                    w.fetch(self._weights.transfers(w.p))
                    if w.p.grad is not None:
                        self._take(w)
            self._worker.join_addition()
            self._step_bucket(bucket)

    @torch.no_grad()
    def _step_bucket(self, bucket: list[Weight]) -> None:
        """Steps weights whose gradients have come, and begins the copies back."""
        for w in bucket:
            if w.arrived is not None:
                self._weights.transfers(w.p).host_waits(w.arrived)
            w.renew()
        try:
            self._step_inner(bucket)
        except torch.OutOfMemoryError:
            # memkern's optimizers make all states before they change anything.
            if not isinstance(self._inner, BlockwiseOptimizer) or not any(w.resident for w in bucket):
                raise
            self._weights.move_to_host(bucket[0], self._inner)
            self._hook_parameters()
            self._step_inner(bucket)
        for w in bucket:
            w.gradient = None
        for w in bucket:
            if w.separate and (event := w.copy_back(self._weights.transfers(w.p))) is not None:
                self._copies.append((w, event))

    def _step_inner(self, bucket: list[Weight]) -> None:
        """The inner optimizer's step of these weights alone, as only they have gradients."""
        takes_any = _TAKES_OTHER_GRADIENTS and isinstance(self._inner, BlockwiseOptimizer)
        for w in bucket:
            g = w.gradient
            assert g is not None
            if g.dtype != w.host_param.dtype and takes_any:
                w.host_param.grad_dtype = g.dtype
            w.host_param.grad = g if g.dtype == w.host_param.dtype or takes_any else g.to(w.host_param.dtype)
        if isinstance(self._inner, Muon):
            self._inner.product_devices = {w.host_param: w.p.device for w in bucket}
        try:
            without_hooks(self._inner.step)()
        finally:
            for w in bucket:
                w.host_param.grad = None

    def _scale_inner(self, scaled: bool = True) -> None:
        """Hands what a GradScaler set for this step to the inner optimizer, on the host; or takes it away."""
        for name in ("grad_scale", "found_inf"):
            if scaled and (given := getattr(self, name, None)) is not None:
                setattr(self._inner, name, torch.as_tensor(given, dtype=torch.float32, device="cpu"))
            else:
                vars(self._inner).pop(name, None)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Else GradScaler unscales the device's gradients itself.
        takes = getattr(self._inner, "_step_supports_amp_scaling", False)
        return self._hooks_gradients or (takes and not lightning_asks())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's, for gradients on the device and on the host."""
        self._finish_backward()
        check_not_stepped(self._stepped)
        self._worker.join_addition()
        self._takes = False
        for w in self._weights.values():
            if set_to_none:
                w.gradient = None
            elif w.gradient is not None:
                w.gradient.zero_()
        super().zero_grad(set_to_none)

    # ---- loading and saving

    def _host_weight(self, p: Tensor) -> Tensor | None:
        """The host's weight of a parameter where it has another dtype, and so more bits."""
        self._finish_backward()
        w = self._weights.get(p)
        return w.host_param.detach() if w is not None and w.host_param.dtype != p.dtype else None

    def _settle(self, converts: bool = True) -> None:
        """Ends steps and follows what has been written, before states are saved, copied or read.

        converts: whether states are converted to options that have changed, as the next step would. States of
            parameters in place of others move to these in any case.
        """
        self._finish_backward()
        converts = converts or not self._weights.are_of(self.param_groups)
        self._hand_over()
        self._weights.follow_memory()
        if converts and isinstance(self._inner, BlockwiseOptimizer):
            self._inner._follow_groups()
        self._hand_back()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with a ``host_weight`` in the state of a parameter of another dtype."""
        self._settle()
        found = super().state_dict()
        if isinstance(self._inner, BlockwiseOptimizer):
            found = loading.saved(found, self.param_groups, self._inner._op_of)
        for i, w in enumerate(self._weights.values()):
            if w.host_param.dtype != w.p.dtype and i in found["state"]:
                found["state"][i] = {**found["state"][i], HOST_WEIGHT: w.host_param.detach()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the inner optimizer's. A weight whose state has no ``host_weight`` is the model's.

        Raises:
            ValueError: the state, or a host weight's shape, does not fit; before anything is changed.
        """
        self._finish_backward()
        self._hand_over()  # its options win over the state's, where the inner optimizer says so
        given = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(self, given) or given
        weights = [*self._weights.values()]
        numbers = [i for group in given["param_groups"] for i in group["params"]]
        loaded, state = {}, {**given["state"]}
        # The inner optimizer has an error for other numbers of them.
        for i, w in zip(numbers, weights, strict=False):
            if isinstance(of_one := state.get(i), dict) and HOST_WEIGHT in of_one:
                loaded[w] = x = of_one[HOST_WEIGHT]
                state[i] = {key: value for key, value in of_one.items() if key != HOST_WEIGHT}
                if x.shape != w.p.shape:
                    raise ValueError(
                        f"{HOST_WEIGHT} of the state_dict does not fit parameter {i}: its shape is {tuple(x.shape)}, "
                        f"expected {tuple(w.p.shape)}"
                    )
        self._inner.load_state_dict({"state": state, "param_groups": given["param_groups"]})
        with torch.no_grad():
            for w in weights:
                if w.separate:
                    local(w.host_param).copy_(local(placed(HOST_WEIGHT, loaded.get(w, w.p), w.p, 1)))
        self._hand_back()
        self._make_buckets()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**super().__getstate__(), **{key: vars(self)[key] for key in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        super().__setstate__(state)
        self._weights.transfers_of = self._transfers_of
        self._hand_back()
        self._make_buckets()
        self._hook_parameters()
