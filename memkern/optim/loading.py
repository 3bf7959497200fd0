"""Loads and saves an optimizer's state dict: checks it, and converts states that were saved with other options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..quant.layout import is_dense, layout_of, same_layout
from ..schemas import StepOp
from . import weights
from .checks import make_plain
from .dtensor.shards import is_dtensor, is_flat_shard, local, placed
from .format import Format, takes_8bit_state
from .state import (
    ENTRIES,
    SIGNED,
    State,
    converted,
    dense_like,
    has_scales,
    layers_of,
    load_moment,
    moment_dtype,
    own_entries,
    state_keys,
)

Group = dict[str, Any]  # a parameter group of an optimizer
OWN_OPTIONS = ("state_bits", "master_weights", "stochastic_rounding")
"""Options that a loaded state does not change: its tensors are converted."""


class Target(NamedTuple):
    """The optimizer that loads a state dict."""

    name: str  # its class's
    groups: Sequence[Group]
    defaults: Group
    fixed_options: Group
    converters: Sequence[str]  # functions of memkern.optim that convert other libraries' states for it
    op_of: Callable[[Group], StepOp]  # the op that a group's options ask for
    check_group: Callable[[Group], None]  # raises for options that it does not support
    beside: Callable[[Tensor, bool], Tensor]  # a tensor like a parameter, where its state is; True: with its values


def _on_cpu(option: Any) -> Any:
    """An option whose tensors a loop has moved to the device with the rest of the state."""
    return tree_map_only(Tensor, Tensor.cpu, option)


class HiddenState:
    """Hides a state from torch's load_state_dict, which would cast its tensors to the parameter's dtype."""

    def __init__(self, state: State) -> None:
        self.state = state


def restored(values: Any, p: Any, group: Group | None, beside: Callable[[Tensor], Tensor]) -> Any:
    """The state that torch's load_state_dict, or a pickle, has left in ``optimizer.state[p]``, as optimizers keep it.

    Tensors that were hidden are copied to the device of ``beside(p)``, with its strides where they have its shape.
    """
    if isinstance(values, HiddenState):
        like = beside(p)
        state = State((key, _copied(x, like) if isinstance(x, Tensor) else x) for key, x in values.state.items())
        state.format = values.state.format
        return state
    return State.of(values, Format.of(group)) if group is not None and isinstance(values, dict) else values


def _copied(x: Tensor, p: Tensor) -> Tensor:
    x = x.detach()
    if is_dtensor(x):
        return x.clone() if x.device == p.device else x.to(p.device)  # HostOffload's is on the host
    like = p if x.shape == p.shape else x
    return torch.empty_like(like, dtype=x.dtype, device=p.device).requires_grad_(False).copy_(x)


def prepared(target: Target, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state dict in the optimizer's own options, its tensors hidden from torch; and the options that differed.

    The optimizer's own class, ``state_bits``, ``max_grad_norm`` and ``capturable`` win; a state in other bits is
    converted. The other options come with the state.

    Raises:
        ValueError: the state is not memkern's, or does not fit the parameters.
    """
    groups, saved = target.groups, state_dict["param_groups"]
    if [len(g["params"]) for g in groups] != [len(s["params"]) for s in saved]:
        return state_dict, []  # torch has a message for this
    changes: list[str] = []
    older, newer = [], []
    for k, (own, given) in enumerate(zip(groups, saved, strict=True)):
        _check_options(target, k, given)
        if (algorithm := given.get("algorithm")) != own.get("algorithm"):
            raise ValueError(
                f"the state_dict's group {k} has algorithm {algorithm!r}, and this optimizer's has "
                f"{own.get('algorithm')!r}, whose states are others: give the optimizer the groups that were saved"
            )
        older.append(
            {key: _on_cpu(x) if key in (*target.defaults, "betas") and key != "lr" else x for key, x in given.items()}
        )
        make_plain(older[k], target.defaults)
        target.check_group({**older[k], "params": own["params"]})
        fixed = {key: own[key] for key in OWN_OPTIONS} | target.fixed_options
        if differing := [f"{key} {older[k][key]} -> {x}" for key, x in fixed.items() if older[k][key] != x]:
            changes.append(f"group {k}: {', '.join(differing)}")
        whole = {"max_grad_norm": own["max_grad_norm"], "capturable": own["capturable"]}
        newer.append({**older[k], **fixed, **whole})
        target.check_group({**newer[k], "params": own["params"]})
    of_index = {
        i: (p, older[k], newer[k])
        for k, own in enumerate(groups)
        for p, i in zip(own["params"], older[k]["params"], strict=True)
    }
    state = {
        i: HiddenState(_state(target, i, values, *of_index[i])) if i in of_index and values != {} else values
        for i, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": newer}, changes


def _check_options(target: Target, k: int, saved: Group) -> None:
    """Raises ValueError for a saved group that lacks options of the optimizer."""
    own = {*target.defaults} - {"differentiable"}  # which torch's __setstate__ adds
    if missing := own - {*saved}:
        names = [f"memkern.optim.{name}" for name in target.converters]
        way = (
            f"{' and '.join(names)} convert{'' if len(names) > 1 else 's'} others"
            if names
            else "no converter to it exists: load the model's weights, and begin with a new state"
        )
        raise ValueError(
            f"the state_dict is not one of memkern's {target.name}: its group {k} has no "
            f"{', '.join(sorted(missing))}; {way}"
        )


def _state(target: Target, i: Any, state: Any, p: Tensor, older: Group, newer: Group) -> State:
    """A parameter's state, checked, and stored as the optimizer's group asks for."""
    if not isinstance(state, dict):
        does_not_fit(target.name, i, f"it must be a dict of tensors, got {state!r}")
    p, op, format = target.beside(p, True), target.op_of(older), Format.of(older)
    if isinstance(step := state.get("step"), (int, float)):  # as torch.optim once had it
        state = {**state, "step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    elif isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        state = {**state, "step": step.float()}
    state = {
        key: placed(key, x, p, format.block_size) if isinstance(x, Tensor) and key in ENTRIES else x
        for key, x in state.items()
    }
    like, state = _as_saved(target.name, op, i, state, p)
    check_state(target.name, op, i, state, like, older)
    found = State(state)
    found.format = format
    in_other_bits = any(older[key] != newer[key] for key in OWN_OPTIONS)
    first = state[next(iter(op.moments))]
    in_other_dtype = first.is_floating_point() and first.dtype != moment_dtype(p)
    if in_other_bits or in_other_dtype or like is not p or is_flat_shard(p):
        new = converted(target.op_of(newer), found, p, newer)
        found.replace(new or {**found}, Format.of(newer))
    return found


BLOCK_ORDER = "block_order"
"""In a saved state with codes: the parameter's dimensions from the outermost in memory to the innermost, int64.

Blocks are cut in memory order, so that codes belong to other scales where they lie otherwise. Strides do not say it: a
file format, or a checkpoint that is loaded into another model's state, may have made the codes contiguous.
"""


def block_order(state: dict[str, Any]) -> dict[str, Tensor]:
    """The entry of that name for a state's codes; nothing where there are none, or of one dimension."""
    codes = next((state[key] for key in SIGNED if f"{key}_scale" in state), None)
    if codes is None or codes.dim() < 2:
        return {}
    stride = codes.stride()
    order = sorted(range(codes.dim()), key=lambda k: (-stride[k], k))
    return {BLOCK_ORDER: torch.tensor(order, dtype=torch.int64, device="cpu")}


def _as_saved(name: str, op: StepOp, i: Any, state: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The parameter, or a meta tensor like it in the memory format that codes were saved in; and the state in that.

    States without a block_order have the memory format that the codes' strides say.
    """
    order, codes = state.get(BLOCK_ORDER), state.get(next(iter(op.moments)))
    state = {key: x for key, x in state.items() if key != BLOCK_ORDER}
    if not isinstance(codes, Tensor) or codes.is_floating_point() or is_dtensor(p) or codes.shape != p.shape:
        return p, state
    if order is not None and _has_values(order):
        if not isinstance(order, Tensor) or sorted(order.tolist()) != [*range(p.dim())]:
            does_not_fit(name, i, f"{BLOCK_ORDER} must be an order of {p.dim()} dimensions, got {order}")
        dims = order.tolist()
        like = torch.empty([p.shape[k] for k in dims], dtype=p.dtype, device="meta")
        like = like.permute([dims.index(k) for k in range(p.dim())])
    elif is_dense(codes.shape, codes.stride()) and not codes.is_contiguous():
        like = torch.empty_strided(codes.shape, codes.stride(), dtype=p.dtype, device="meta")
    else:
        return p, state
    if same_layout(like, dense_like(p)):
        like = p
    stride = dense_like(like).stride()
    for key in op.moments:
        x = state.get(key)
        if isinstance(x, Tensor) and x.shape == p.shape and x.stride() != stride:
            state[key] = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    return like, state


def does_not_fit(name: str, i: Any, what: str) -> NoReturn:
    raise ValueError(f"the state of parameter {i} does not fit {name}: {what}")


Refuse = Callable[[str], NoReturn]


def check_state(name: str, op: StepOp, i: Any, state: dict[str, Any], p: Tensor, group: Group) -> None:
    """Raises ValueError unless these are the entries that the group's options ask for. ``name``: the optimizer's."""
    refuse = functools.partial(does_not_fit, name, i)
    first = state.get(next(iter(op.moments)))
    coded = isinstance(first, Tensor) and not first.is_floating_point()
    keys = [k for k in state_keys(op) if coded or not k.endswith("_scale")]
    keys += weights.keys_of(group)
    if {*own_entries(state)} != {*keys}:
        refuse(f"keys {sorted(state)}, expected {sorted(keys)}")
    for key in keys:
        value = state[key]
        if not isinstance(value, Tensor):
            refuse(f"{key} must be a tensor, got {type(value).__name__}")
        if key == "step":
            if value.numel() != 1 or value.dtype != torch.float32:
                refuse(f"step must be one float32 number, got {value}")
            if _has_values(value) and not 0 <= float(value) < 2**63:  # as the kernels count
                refuse(f"step must be one finite number, 0 or more and below 2^63, got {value}")
        elif key.endswith("_scale"):
            _check_scale(refuse, key, value, layout_of(dense_like(p), group["block_size"]).scale_shape)
        elif key == "trust_ratio":
            count = layers_of(p, group)
            if value.dtype not in (torch.float32, torch.float64) or tuple(value.shape) != (count,):
                refuse(
                    f"trust_ratio must be float32 of shape ({count},), got {value.dtype} of shape {tuple(value.shape)}"
                )
        elif key in weights.KEYS:
            dtype = weights.MASTER_WEIGHTS[group["master_weights"]][key]
            if value.dtype != dtype or value.shape != p.shape:
                refuse(
                    f"{key} must be {dtype} of shape {tuple(p.shape)}, got {value.dtype} of shape {tuple(value.shape)}"
                )
        elif key in op.moments:
            _check_moment(refuse, key, value, p, coded, op.moments[key])
    # SGD and Lion may have such numbers of their own; Adam's m and v cannot both.
    may_be_codes = not coded and (len(op.moments) > 1 or takes_8bit_state(p, group))
    if may_be_codes and all(_are_codes(local(state[key]), signed) for key, signed in op.moments.items()):
        # torch.distributed.checkpoint.load writes into the tensors of this optimizer's state, whatever was saved.
        refuse(
            f"{', '.join(op.moments)}: codes of an 8-bit state as floats; torch.distributed.checkpoint loads into a "
            "state of the state_bits that were saved: give the optimizer state_bits=8, load, and change that of its "
            "groups then"
        )


def _check_scale(refuse: Refuse, key: str, scale: Tensor, shape: Any) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        refuse(f"{key} must be float32 of shape {shape}, got {scale.dtype} of shape {tuple(scale.shape)}")
    if _has_values(scale) and not bool(((local(scale) >= 0) & local(scale).isfinite()).all()):
        refuse(f"{key} has entries that are negative or not finite")


def _has_values(x: Any) -> bool:
    """False on meta and under FakeTensorMode."""
    return not getattr(x, "is_meta", False) and type(x).__name__ != "FakeTensor"


def _are_codes(x: Tensor, signed: bool) -> bool:
    """Whether floats are whole numbers up to the largest code, which each block has whose scale is not zero."""
    return (
        x.numel() > 1
        and _has_values(x)
        and bool((x == x.trunc()).all())
        and float(x.abs().max()) in ((127, 128) if signed else (255,))
    )


def _check_moment(refuse: Refuse, key: str, value: Tensor, p: Tensor, coded: bool, signed: bool) -> None:
    codes = torch.int8 if signed else torch.uint8
    allowed = (codes,) if coded else (torch.float32, torch.float64)
    if value.dtype not in allowed or value.shape != p.shape:
        refuse(f"{key} must be {allowed[0]} of shape {tuple(p.shape)}, got {value.dtype} of shape {tuple(value.shape)}")
    like = dense_like(p)
    if coded and not same_layout(value, like):
        refuse(
            f"{key} must have strides {like.stride()} like its parameter, got {value.stride()}; load the state while "
            "the model has the memory format that it was saved in, and change that after: the next step converts it"
        )
    if not coded and not signed and _has_values(value) and bool((local(value) < 0).any()):
        refuse(f"{key}, a second moment, has negative entries")


def saved(state_dict: dict[str, Any], groups: Sequence[Group], op_of: Callable[[Group], StepOp]) -> dict[str, Any]:
    """torch's state_dict as it is saved: plain dicts, with the order of blocks beside codes (:data:`BLOCK_ORDER`).

    Moments of FSDP1's flat shards are floats: FullyShardedDataParallel.optim_state_dict gathers entries that have one
    number per element, and makes the states of the model's own tensors of them. Loading quantizes them again.
    """
    params = [(p, group) for group in groups for p in group["params"]]
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    found = {i: dict(x) if isinstance(x, dict) else x for i, x in state_dict["state"].items()}
    for (p, group), i in zip(params, numbers, strict=True):
        state = state_dict["state"].get(i, {})
        moments = op_of(group).moments
        if is_flat_shard(p) and has_scales(state):
            floats = {key: load_moment(key, state) for key in moments}
            found[i] = {key: floats.get(key, x) for key, x in state.items() if not key.endswith("_scale")}
        elif state:
            found[i] |= block_order(state)
    return {**state_dict, "state": found}
