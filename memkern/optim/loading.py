"""Loads and saves state dicts of optimizers: checks them, and converts states that were saved with other options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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
    count_layers,
    dense_like,
    has_scales,
    load_moment,
    moment_dtype,
    own_entries,
    state_keys,
)

Group = dict[str, Any]  # a parameter group of an optimizer
OWN_OPTIONS = ("state_bits", "master_weights", "stochastic_rounding")
"""Options that stay those of the optimizer: the loaded tensors are converted to them."""


def _on_cpu(option: Any) -> Any:
    """An option with its tensors, which a loop may have moved to the device with the state, on the CPU."""
    return tree_map_only(Tensor, Tensor.cpu, option)


class HiddenState:
    """Hides a state from torch's load_state_dict, which would cast its tensors to the parameter's dtype."""

    def __init__(self, state: State) -> None:
        self.state = state


def restore_state(values: Any, p: Any, group: Group | None, stand_in: Callable[[Tensor], Tensor]) -> Any:
    """The :class:`State` of what torch's load_state_dict, or a pickle, has left in ``optimizer.state[p]``.

    Hidden tensors are copied to the device of ``stand_in(p)``, with its strides where they have its shape.
    """
    if isinstance(values, HiddenState):
        like = stand_in(p)
        state = State((key, _copied(x, like) if isinstance(x, Tensor) else x) for key, x in values.state.items())
        state.format = values.state.format
        return state
    return State.of(values, Format.of(group)) if group is not None and isinstance(values, dict) else values


def _copied(x: Tensor, p: Tensor) -> Tensor:
    x = x.detach()
    if is_dtensor(x):
        return x.clone() if x.device == p.device else x.to(p.device)  # HostOffload keeps it on the host
    like = p if x.shape == p.shape else x
    return torch.empty_like(like, dtype=x.dtype, device=p.device).requires_grad_(False).copy_(x)


def prepare(optimizer: Any, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state dict as torch is to load it, its tensors hidden, and a list of the options that differed.

    The block-wise optimizer's :data:`OWN_OPTIONS`, its class's fixed ones, ``max_grad_norm`` and ``capturable`` win;
    states are converted to them. The other options come with the state.

    Raises:
        ValueError: the state is not memkern's, or does not fit the parameters.
    """
    groups, given_groups = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in given_groups]:
        return state_dict, []  # for which torch has an error
    changes: list[str] = []
    new_groups: list[Group] = []
    owners: dict[Any, tuple[Tensor, Group, Group]] = {}  # by key in the state: the parameter, its old and new group
    option_keys = {*optimizer.defaults, "betas"} - {"lr"}
    for number, (group, given) in enumerate(zip(groups, given_groups, strict=True)):
        _check_options(optimizer, number, given)
        if (algorithm := given.get("algorithm")) != group.get("algorithm"):
            raise ValueError(
                f"the state_dict's group {number} has algorithm {algorithm!r}, and this optimizer's has "
                f"{group.get('algorithm')!r}, whose states are others: give the optimizer the groups that were saved"
            )
        old = {key: _on_cpu(x) if key in option_keys else x for key, x in given.items()}
        make_plain(old, optimizer.defaults)
        optimizer._check_loaded({**old, "params": group["params"]})
        fixed = {key: group[key] for key in OWN_OPTIONS} | optimizer.fixed_options
        if differing := [f"{key} {old[key]} -> {x}" for key, x in fixed.items() if old[key] != x]:
            changes.append(f"group {number}: {', '.join(differing)}")
        new = {**old, **fixed, "max_grad_norm": group["max_grad_norm"], "capturable": group["capturable"]}
        optimizer._check_loaded({**new, "params": group["params"]})
        new_groups.append(new)
        owners |= {i: (p, old, new) for p, i in zip(group["params"], old["params"], strict=True)}
    state = {
        i: HiddenState(_load_state(optimizer, i, values, *owners[i])) if i in owners and values != {} else values
        for i, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": new_groups}, changes


def _check_options(optimizer: Any, number: int, saved: Group) -> None:
    """Raises ValueError for a saved group, of that number, that lacks options of the optimizer."""
    own = {*optimizer.defaults} - {"differentiable"}  # which torch's __setstate__ adds
    if missing := own - {*saved}:
        names = [f"memkern.optim.{name}" for name in optimizer.converters]
        advice = (
            f"{' and '.join(names)} convert{'' if len(names) > 1 else 's'} others"
            if names
            else "no converter to it exists: load the model's weights, and begin with a new state"
        )
        raise ValueError(
            f"the state_dict is not one of memkern's {type(optimizer).__name__}: its group {number} has no "
            f"{', '.join(sorted(missing))}; {advice}"
        )


def _load_state(optimizer: Any, i: Any, state: Any, p: Tensor, old: Group, new: Group) -> State:
    """A saved state, checked, and stored as ``new``, the optimizer's group, asks for. ``old``: the saved group."""
    name = type(optimizer).__name__
    if not isinstance(state, dict):
        refuse_state(name, i, f"it must be a dict of tensors, got {state!r}")
    p, op, format = optimizer._stand_in(p, True), optimizer._op_of(old), Format.of(old)
    if isinstance(step := state.get("step"), (int, float)):  # as in old versions of torch.optim
        state = {**state, "step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    elif isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        state = {**state, "step": step.float()}
    state = {
        key: placed(key, x, p, format.block_size) if isinstance(x, Tensor) and key in ENTRIES else x
        for key, x in state.items()
    }
    like, state = _in_saved_order(name, op, i, state, p)
    check_state(name, op, i, state, like, old)
    result = State(state)
    result.format = format
    in_other_bits = any(old[key] != new[key] for key in OWN_OPTIONS)
    first_moment = state[next(iter(op.moments))]
    in_other_dtype = first_moment.is_floating_point() and first_moment.dtype != moment_dtype(p)
    if in_other_bits or in_other_dtype or like is not p or is_flat_shard(p):
        entries = converted(optimizer._op_of(new), result, p, new)
        result.replace(entries or {**result}, Format.of(new))
    return result


BLOCK_ORDER = "block_order"
"""In a saved state with codes: the parameter's dimensions from the outermost in memory to the innermost, int64.

Blocks are cut in memory order, so codes can be read only in the order in which they were cut. Their strides do not tell
it: a file format, or a checkpoint that is loaded into another model's state, may have made them contiguous.
"""


def block_order(state: dict[str, Any]) -> dict[str, Tensor]:
    """The entry :data:`BLOCK_ORDER` for a state; none where it has no codes, or codes of one dimension."""
    codes = next((state[key] for key in SIGNED if f"{key}_scale" in state), None)
    if codes is None or codes.dim() < 2:
        return {}
    stride = codes.stride()
    order = sorted(range(codes.dim()), key=lambda dim: (-stride[dim], dim))
    return {BLOCK_ORDER: torch.tensor(order, dtype=torch.int64, device="cpu")}


def _in_saved_order(name: str, op: StepOp, i: Any, state: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The parameter, or a meta tensor like it in the memory format that its codes were saved in; and the state in it.

    Codes without a block_order were saved in the memory format that their strides have.
    """
    order, codes = state.get(BLOCK_ORDER), state.get(next(iter(op.moments)))
    state = {key: x for key, x in state.items() if key != BLOCK_ORDER}
    if not isinstance(codes, Tensor) or codes.is_floating_point() or is_dtensor(p) or codes.shape != p.shape:
        return p, state
    if order is not None and _has_values(order):
        if not isinstance(order, Tensor) or sorted(order.tolist()) != [*range(p.dim())]:
            refuse_state(name, i, f"{BLOCK_ORDER} must be an order of {p.dim()} dimensions, got {order}")
        dims = order.tolist()
        like = torch.empty([p.shape[dim] for dim in dims], dtype=p.dtype, device="meta")
        like = like.permute([dims.index(dim) for dim in range(p.dim())])
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


def refuse_state(name: str, i: Any, reason: str) -> NoReturn:
    raise ValueError(f"the state of parameter {i} does not fit {name}: {reason}")


Refuse = Callable[[str], NoReturn]  # refuse_state for one parameter


def check_state(name: str, op: StepOp, i: Any, state: dict[str, Any], p: Tensor, group: Group) -> None:
    """Raises ValueError unless ``state`` has the entries that the group's options ask for. ``name``: of the class."""
    refuse = functools.partial(refuse_state, name, i)
    first_moment = state.get(next(iter(op.moments)))
    coded = isinstance(first_moment, Tensor) and not first_moment.is_floating_point()
    keys = [key for key in state_keys(op) if coded or not key.endswith("_scale")]
    keys += weights.MASTER_WEIGHTS[group["master_weights"]]
    if {*own_entries(state)} != {*keys}:
        refuse(f"keys {sorted(state)}, expected {sorted(keys)}")
    for key in keys:
        value = state[key]
        if not isinstance(value, Tensor):
            refuse(f"{key} must be a tensor, got {type(value).__name__}")
        if key == "step":
            if value.numel() != 1 or value.dtype != torch.float32:
                refuse(f"step must be one float32 number, got {value}")
            if _has_values(value) and not 0 <= float(value) < 2**63:  # kernels count in int64
                refuse(f"step must be one finite number, 0 or more and below 2^63, got {value}")
        elif key.endswith("_scale"):
            _check_scale(refuse, key, value, layout_of(dense_like(p), group["block_size"]).scale_shape)
        elif key == "trust_ratio":
            count = count_layers(p, group)
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
    # A float moment of SGD or Lion may be whole numbers by chance; Adam's m and v cannot both be.
    may_be_codes = not coded and (len(op.moments) > 1 or takes_8bit_state(p, group))
    if may_be_codes and all(_are_codes(local(state[key]), signed) for key, signed in op.moments.items()):
        # torch.distributed.checkpoint.load writes saved codes into the float tensors of this optimizer's state.
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
    """Whether a tensor has values, as none has on meta and under FakeTensorMode."""
    return not getattr(x, "is_meta", False) and type(x).__name__ != "FakeTensor"


def _are_codes(x: Tensor, signed: bool) -> bool:
    """Whether floats are whole numbers up to the largest code, which every block of codes has unless it is all zero."""
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


def complete_state_dict(
    state_dict: dict[str, Any], groups: Sequence[Group], op_of: Callable[[Group], StepOp]
) -> dict[str, Any]:
    """torch's state_dict with states as plain dicts, and with the order of blocks for codes (:data:`BLOCK_ORDER`).

    Codes of FSDP1's flat shards become floats: FullyShardedDataParallel.optim_state_dict gathers entries that have one
    number per element, and makes the states of the model's own tensors of them. Loading quantizes them again.
    """
    params = [(p, group) for group in groups for p in group["params"]]
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    states = {i: dict(x) if isinstance(x, dict) else x for i, x in state_dict["state"].items()}
    for (p, group), i in zip(params, numbers, strict=True):
        state = state_dict["state"].get(i, {})
        moments = op_of(group).moments
        if is_flat_shard(p) and has_scales(state):
            floats = {key: load_moment(key, state) for key in moments}
            states[i] = {key: floats.get(key, x) for key, x in state.items() if not key.endswith("_scale")}
        elif state:
            states[i] |= block_order(state)
    return {**state_dict, "state": states}
