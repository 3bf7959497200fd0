"""HostOffload: keeps optimizer states, and if wanted fp32 weights and gradients, on the host."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import loading, threads
from ..backward import (
    ParameterHooks,
    StepInBackward,
    check_class,
    check_not_reduced_later,
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
from .device import class_on_host
from .host_weights import HostWeights
from .transfers import transfers_of
from .weight import Weight, has_gradient

HOST_WEIGHT = "host_weight"
"""The key of the host's weight in a parameter's state in ``state_dict()``, where it has another dtype."""
_TAKES_OTHER_GRADIENTS = hasattr(Tensor, "grad_dtype")  # torch 2.11: p.grad may have another dtype than p
# Attributes that copies and pickles contain beside torch.optim's.
_COPIED = ("_inner", "_class", "_options", "_hooks_gradients", "_weights")


class HostOffload(Optimizer):
    r"""An optimizer whose states are on the host. Its steps are taken there by the CPU, or by the device.

    ::

        model.to("cuda", torch.bfloat16)
        optimizer = memkern.optim.HostOffload(memkern.optim.AdamW8bit, model.parameters(), lr=1e-4, step_on="device")
        # the loop is as always: loss.backward(); optimizer.step(); optimizer.zero_grad()

    ``step_on="device"``: the states are in pinned memory of the host. A step walks buckets of 64 MiB of them: while the
    device's own op steps one bucket, the one before goes back and the next one comes, with a stream of copies for each
    direction. ``step()`` returns when all of that is queued. Weights and gradients stay on the device. The object is an
    instance of ``optimizer_class``, too: groups, schedulers, hooks, GradScaler and ``state_dict`` work as that class's,
    and weights and states have every bit of the optimizer without HostOffload; its state tensors are on the CPU. With
    ``step_in_backward`` it is :class:`StepInBackward` of that class: a parameter's states come before its gradient, in
    the order of the last backward pass. Read and write states through ``optimizer.state`` and ``state_dict()``, which
    wait for copies that are under way. For parameters on the CPU it is ``optimizer_class`` itself.

    ``step_on="cpu"``: for each parameter p on the device the host has a weight in ``host_dtype``. A step copies the
    gradient to the host, steps the host's weight there with the CPU's kernels, and copies it back to p, rounded to p's
    dtype. The three overlap: while one bucket of tensors is stepped, gradients of the next ones come and weights of the
    last ones go.

    Args:
        optimizer_class: memkern's; with ``step_on="cpu"`` torch.optim's too.
        params: parameters of the model, on any device.
        step_on: "cpu" or "device". Default "cpu".
        step_in_backward: with "device", each parameter is stepped when its gradient has come, which is then freed.
            Default False.
        host_dtype: with "cpu", dtype of the weights on the host, default torch.float32, so that a half-precision model
            has an fp32 model on the host. None: each parameter's own. A parameter of 4 or 8 bytes per element keeps its
            dtype. For bf16 parameters memkern's optimizers use ``master_weights="bf16+16"`` instead, which has fp32's
            bits; where ``master_weights`` or ``stochastic_rounding`` is given, host_dtype has no effect.
        offload_gradients: with "cpu", each gradient goes to the host when ``backward()`` has computed it and is freed
            on the device; gradients of further ``backward()`` calls are added there, in the parameter's dtype. Default
            False.
        options: the options of ``optimizer_class``. ``max_grad_norm`` is the norm of all gradients; with "cpu" it makes
            a step wait for all of them.

    | | "device" | "device", ``step_in_backward`` | "cpu" | "cpu", ``offload_gradients`` |
    |---|---|---|---|---|
    | device, bytes per bf16 parameter | 4, two buckets | 2, a few gradients, two buckets | 4 | 2, a few gradients |
    | on the host | states | states | 4 (weight), 2 to 6 (buffers), states | the same |
    | over the link per step, down and up | states, states | states, states | 4, 2 | 4, 2 |
    | accumulation | on the device | raises | on the device | on the host |
    | clipping | max_grad_norm or torch's functions | raises | max_grad_norm or torch's functions | max_grad_norm |
    | GradScaler | yes | raises | yes | raises |

    A bucket is 64 MiB. A parameter with more bytes of states is stepped some rows at a time, except with LAMB and LARS,
    Muon's matrices and shards, whose states come at once. States of ``AdamW8bit`` are 2.06 bytes per parameter, and
    4.06 with ``master_weights="bf16+16"``.

    With "cpu", ``step()`` returns when the host is done; copies of weights may be under way, and the device's current
    stream waits for them. With ``offload_gradients`` a step uses up the gradients.

    It is a torch.optim.Optimizer of the model's parameters, and reads its groups and states as they are at the step:
    lists may be assigned, extended or shortened. What the step changes in groups (some classes count steps there) is
    changed here, too; a class whose ``step`` is neither memkern's nor torch.optim's takes all gradients in one call.

    ``state_dict()`` is that of ``optimizer_class``, which can load it. With "cpu", the bits that the host's weight has
    beyond the model's are in the state as ``weight_error``, or in ``host_weight``, the fp32 weight, where the optimizer
    is not memkern's or the model is fp16. A step starts from the model's weights, also if they were loaded or edited
    (under no_grad, or as ``p.data``): it adds the error to the model's weight, and uses the fp32 weight where it rounds
    to the model's. For parameters on the CPU nothing is copied that the step can read where it is.

    For DTensors (fully_shard, HSDP, tensor parallelism) each rank has its shards on its host: states and host weights
    are DTensors of the same mesh and placements, which torch.distributed.checkpoint saves and reshards. Norms
    (max_grad_norm, LAMB, LARS) and, with "cpu", Muon's matrices are reduced and exchanged on the mesh's device, whose
    process group is enough. The result has every bit of the optimizer without HostOffload.

    Host memory that is copied from or to is pinned. Where the system gives no more pinned memory, states for
    ``step_on="device"`` are in ordinary memory, with a warning.

    Raises:
        ValueError, TypeError: from ``optimizer_class``; an option of another type, or of the other ``step_on``; with
            "device" a class that is not memkern's, ``capturable``, and shards of Muon's matrices.
        RuntimeError: in ``backward()``, ``step()`` or ``zero_grad()``: what the table says raises.

    Sources: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv 2101.06840); states that come
    to the device by buckets: Megatron-LM's chunked optimizer states.
    """

    wraps_a_class = True  # so that no other wrapper takes the class

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients leave the device in the backward pass, so that nobody else can clip them."""
        return self._hooks_gradients

    clips_by_norm = True  # supports max_grad_norm
    _inner: Optimizer
    _transfers_of = staticmethod(transfers_of)

    def __new__(
        cls,
        optimizer_class: Any = None,
        params: Any = None,
        *,
        step_on: str = "cpu",
        step_in_backward: bool = False,
        **options: Any,
    ) -> Any:
        if "device_state_bytes" in options:
            raise TypeError("HostOffload has no device_state_bytes any more: step_on='device' steps states on the host")
        if step_on == "cpu":
            if step_in_backward:
                raise ValueError(
                    "step_in_backward must be False with step_on='cpu', got True: step_on='device' steps in the "
                    "backward pass; offload_gradients=True frees gradients as early, and steps after the backward pass"
                )
            return super().__new__(cls)
        if step_on != "device":
            raise ValueError(f"step_on must be 'cpu' or 'device', got {step_on!r}")
        check_class(optimizer_class)
        if not issubclass(optimizer_class, BlockwiseOptimizer):
            raise TypeError(
                "optimizer_class must be one of memkern.optim with step_on='device', got "
                f"{optimizer_class.__module__}.{optimizer_class.__name__}; step_on='cpu' takes torch.optim's"
            )
        for name, default in (("host_dtype", torch.float32), ("offload_gradients", False)):
            if (value := options.pop(name, default)) not in (default, None):
                raise ValueError(f"{name} is for step_on='cpu', got {value!r} with step_on='device'")
        on_host = class_on_host(optimizer_class, cls._transfers_of)
        return StepInBackward(on_host, params, **options) if step_in_backward else on_host(params, **options)

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Any,
        *,
        step_on: str = "cpu",
        step_in_backward: bool = False,
        host_dtype: torch.dtype | None = torch.float32,
        offload_gradients: bool = False,
        **options: Any,
    ) -> None:
        check_class(optimizer_class)
        if host_dtype is not None and host_dtype not in (torch.float32, torch.float64):
            raise ValueError(f"host_dtype must be None, torch.float32 or torch.float64, got {host_dtype!r}")
        self._class, self._options = optimizer_class, options
        self._hooks_gradients = offload_gradients
        self._weights = HostWeights(optimizer_class, options, host_dtype)
        self._weights.transfers_of = self._transfers_of
        self._start()
        super().__init__(params, {})

    def _start(self) -> None:
        """Makes the attributes that copies and pickles do not have."""
        self._addition: Callable[[], None] | None = None  # adds a gradient whose copy is under way to one on the host
        self._copies: list[tuple[Weight, Any]] = []  # weights that are being copied to the device, with the events
        self._has_followed = False  # whether groups were followed for this step's gradients
        self._lock = threading.Lock()  # the backward pass has a thread for each device
        self._hooks = ParameterHooks(self._take_in_backward)

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the host's weights, with the groups' options."""
        self._hand_over()
        return self._inner

    # ---- groups and states, which are the inner optimizer's during a step

    def _hand_over(self) -> None:
        """Gives the inner optimizer the groups and states as they are now, with the host's weights for parameters."""
        weights, groups, inner_groups = self._weights, self.param_groups, self._inner.param_groups
        sizes, inner_sizes = ([len(group["params"]) for group in x] for x in (groups, inner_groups))
        changed = sizes != inner_sizes or not weights.are_of(groups)
        if changed:
            weights.follow_lists(groups)
            inner_groups += ({} for _ in groups[len(inner_groups) :])
            del inner_groups[len(groups) :]
        for group, inner_group in zip(groups, inner_groups, strict=True):
            params = [weights[p].host_param for p in group["params"]] if changed else inner_group["params"]
            inner_group.clear()
            inner_group.update(group, params=params)
        states, inner_states = self.state, self._inner.state
        same_states = len(states) == len(inner_states) and all(
            map(operator.is_, states.values(), inner_states.values())
        )
        if changed or not same_states:
            inner_states.clear()
            inner_states.update((weights.host_param_of(p), x) for p, x in states.items())
        if changed:
            self._make_buckets()
            self._hook_parameters()

    def _hand_back(self) -> None:
        """Takes options and states as the inner optimizer has them now. ``state[p]`` is the same dict in both."""
        for inner_group, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(inner_group, params=params)
        self._weights.give_states(self._inner.state, self.state)

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's, with the inner optimizer's checks."""
        if self.param_groups:
            self._hand_over()
        given_keys = set(param_group)  # before torch.optim adds the defaults
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self._weights.are_in_states(group):
            group["master_weights"] = "bf16+16"  # fp32's bits
            given_keys.add("master_weights")
        try:
            weights = [self._weights.new(p, group) for p in group["params"]]
            host_params: list[Any] = [w.host_param for w in weights]
            if "param_names" in group:
                host_params = [*zip(group["param_names"], host_params, strict=True)]
            # Options that the group was not given are left to the inner optimizer, which has defaults or an error.
            options = {key: x for key, x in group.items() if key in given_keys - {"params", "param_names"}}
            if len(self.param_groups) == 1:
                self._inner = self._class([{"params": host_params, **options}], **self._options)
            else:
                self._inner.add_param_group({"params": host_params, **options})
        except BaseException:
            self.param_groups.pop()
            raise
        self.defaults = self._inner.defaults
        self._weights.add(weights)
        self._hand_back()
        self._make_buckets()
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """With ``offload_gradients``, hooks the parameters that need a gradient and have no hook yet."""
        if self._hooks_gradients:
            self._hooks.follow(w.p for w in self._weights.values() if not w.frozen)

    def _make_buckets(self) -> None:
        """Cuts the weights into buckets: into one where the step needs all gradients at once."""
        self._is_clipping = self.defaults.get("max_grad_norm") is not None
        in_one_bucket = self._is_clipping or not steps_each_by_itself(self._class)
        self._weights.make_buckets(in_one_bucket, Order(self.param_groups))

    # ---- gradients

    def _take(self, w: Weight) -> None:
        """Begins the copy of a gradient to the host, or takes it where memory is shared; adds it to an earlier one."""
        self._finish_addition()
        self._addition = w.take_gradient(self._weights.transfers(w.p))
        if self._hooks_gradients:
            w.p.grad = None

    def _take_in_backward(self, p: Tensor) -> None:
        """The hook of a parameter whose gradient is complete."""
        check_not_reduced_later(p, HostOffload, "leave offload_gradients False")
        with self._lock:
            if not self._has_followed:
                self._hand_over()
                self._has_followed = True
            if (w := self._weights.get(p)) is not None:  # else it has left the groups, and others may want its gradient
                self._take(w)

    def _finish_addition(self) -> None:
        """Adds the gradient whose copy was begun last to the one on the host; the backward pass went on meanwhile."""
        if self._addition is not None:
            addition, self._addition = self._addition, None
            addition()

    def _forget_gradients(self) -> None:
        """Frees the gradients on the host, which a step has used."""
        self._has_followed, self._addition = False, None
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
            refuse_scaler(self, "leave offload_gradients False")
            refuse_clipping(self)
            self._hooks.check_newest()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
            self._hand_back()
        return loss

    def _follow(self) -> None:
        """Follows what has changed in groups and parameters, before the first bucket is stepped."""
        self._hand_over()
        self._thaw()
        self._weights.follow_memory()
        if isinstance(self._inner, BlockwiseOptimizer):
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
                    self._weights.thaw(p, group, self._inner)
        self._make_buckets()

    def _step_buckets(self) -> None:
        """Steps the weights with gradients. The gradients of a bucket are copied while the one before is stepped."""
        buckets = [[*filter(has_gradient, bucket)] for bucket in self._weights.buckets]
        ready = [w for bucket in buckets for w in bucket]
        if not any(w.separate for w in self._weights.values()):
            buckets = [ready]  # nothing is copied: one call, as without HostOffload
        elif ready:
            threads.warn_of_one_core()
        if isinstance(self._inner, BlockwiseOptimizer):  # before the first bucket is changed
            for p in (w.p for w in ready):
                if p.grad is not None:  # else the gradient is on the host already
                    check_gradient(p, p.grad)
        # Ranks decide together about each bucket, so that a bucket that is empty on this rank counts, too.
        ranks_decide = isinstance(self._inner, BlockwiseOptimizer) and self._inner._all_ranks.meshes
        if not ranks_decide:
            buckets = [bucket for bucket in buckets if bucket]
        for i, bucket in enumerate(buckets):
            # Copies are one bucket ahead of steps: before the first step those of two buckets begin.
            for next_bucket in buckets[:2] if i == 0 else buckets[i + 1 : i + 2]:
                for w in next_bucket:
                    w.copy_to_host(self._weights.transfers(w.p))
                    if w.p.grad is not None:
                        self._take(w)
            self._finish_addition()
            self._step_bucket(bucket)

    @torch.no_grad()
    def _step_bucket(self, bucket: list[Weight]) -> None:
        """Steps weights whose gradients' copies were begun, and begins the copies back to the device."""
        for w in bucket:
            if w.arrived is not None:
                self._weights.transfers(w.p).host_waits(w.arrived)
            w.adopt_edits()
        self._step_inner(bucket)
        for w in bucket:
            w.gradient = None
        for w in bucket:
            if w.separate and (event := w.copy_back(self._weights.transfers(w.p))) is not None:
                self._copies.append((w, event))

    def _step_inner(self, bucket: list[Weight]) -> None:
        """Has the inner optimizer step these weights alone, which are given gradients for it."""
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
        """Gives the inner optimizer what a GradScaler has set for this step, on the host; with False takes it away."""
        for name in ("grad_scale", "found_inf"):
            if scaled and (value := getattr(self, name, None)) is not None:
                setattr(self._inner, name, torch.as_tensor(value, dtype=torch.float32, device="cpu"))
            else:
                vars(self._inner).pop(name, None)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If it is False, GradScaler unscales the device's gradients itself.
        inner_unscales = getattr(self._inner, "_step_supports_amp_scaling", False)
        return self._hooks_gradients or (inner_unscales and not lightning_asks())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's, for gradients on the device and on the host."""
        self._finish_addition()
        self._has_followed = False
        for w in self._weights.values():
            if set_to_none:
                w.gradient = None
            elif w.gradient is not None:
                self._weights.transfers(w.p).host_waits(w.arrived)  # for the gradient, which would replace the zeros
                w.gradient.zero_()
        super().zero_grad(set_to_none)

    # ---- loading and saving

    def _host_weight(self, p: Tensor) -> Tensor | None:
        """The host's weight of a parameter; None where it has the parameter's dtype, and so no more bits."""
        w = self._weights.get(p)
        return w.host_param.detach() if w is not None and w.host_param.dtype != p.dtype else None

    def _follow_edits(self, converts: bool = True) -> None:
        """Follows edits of groups, states and parameters, before states are saved, copied or read.

        converts: whether states are converted to options that have changed, as the next step would convert them. Where
            parameters were replaced, states are converted and move to the new ones in any case.
        """
        converts = converts or not self._weights.are_of(self.param_groups)
        self._hand_over()
        self._weights.follow_memory()
        if converts and isinstance(self._inner, BlockwiseOptimizer):
            self._inner._follow_groups()
        self._hand_back()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with a ``host_weight`` in the state of a parameter of another dtype."""
        self._follow_edits()
        result = super().state_dict()
        if isinstance(self._inner, BlockwiseOptimizer):
            result = loading.complete_state_dict(result, self.param_groups, self._inner._op_of)
        for i, w in enumerate(self._weights.values()):
            if w.host_param.dtype != w.p.dtype and i in result["state"]:
                result["state"][i] = {**result["state"][i], HOST_WEIGHT: w.host_param.detach()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the inner optimizer's. A state without ``host_weight`` leaves the host the model's weight.

        Raises:
            ValueError: the state, or a host weight's shape, does not fit; before anything is changed.
        """
        self._hand_over()  # some options of the inner optimizer's groups win over the state_dict's
        incoming = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            incoming = pre_hook(self, incoming) or incoming
        weights = [*self._weights.values()]
        numbers = [i for group in incoming["param_groups"] for i in group["params"]]
        host_weights, state = {}, {**incoming["state"]}
        # Not strict: the inner optimizer has an error for another number of parameters.
        for i, w in zip(numbers, weights, strict=False):
            if isinstance(entries := state.get(i), dict) and HOST_WEIGHT in entries:
                host_weights[w] = x = entries[HOST_WEIGHT]
                state[i] = {key: value for key, value in entries.items() if key != HOST_WEIGHT}
                if x.shape != w.p.shape:
                    raise ValueError(
                        f"{HOST_WEIGHT} of the state_dict does not fit parameter {i}: its shape is {tuple(x.shape)}, "
                        f"expected {tuple(w.p.shape)}"
                    )
        self._inner.load_state_dict({"state": state, "param_groups": incoming["param_groups"]})
        with torch.no_grad():
            for w in weights:
                if w.separate:
                    local(w.host_param).copy_(local(placed(HOST_WEIGHT, host_weights.get(w, w.p), w.p, 1)))
        self._hand_back()
        self._make_buckets()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._follow_edits()
        return {**super().__getstate__(), **{key: vars(self)[key] for key in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        super().__setstate__(state)
        self._weights.transfers_of = self._transfers_of
        self._hand_back()
        self._make_buckets()
        self._hook_parameters()
