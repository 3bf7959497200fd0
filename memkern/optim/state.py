"""A parameter's state: its entries, the format in which they are stored, and the conversion to another format."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from .. import _ops
from ..quant.blockwise import dequantize_blockwise
from ..quant.layout import EVERY_ROW, arithmetic, is_dense, layer_count, layout_of, same_layout
from ..reference.blockwise import sqrt
from ..schemas import AMSGRAD_STEP, STEP_OPS, StepOp
from . import weights
from .dtensor import blocks, shards
from .format import Format, takes_8bit_state

SIGNED = {name: signed for op in STEP_OPS.values() for name, signed in op.moments.items()}
"""By a moment's name: whether its codes are signed."""
ENTRIES = {
    *(*SIGNED, *AMSGRAD_STEP.moments),
    *(f"{name}_scale" for name in SIGNED),
    *("step", "trust_ratio", *weights.KEYS),
}
"""memkern's own entries of a state. Wrappers may add others (timm's Lookahead), which stay as they are."""


def _forgetting_step(method: Any) -> Any:
    """Wraps a method of dict that changes entries, for :class:`State`, which then forgets the plan of its last step."""

    @functools.wraps(method)
    def forget_and_call(self: State, *args: Any, **kwargs: Any) -> Any:
        self.plan = self._layout = None
        return method(self, *args, **kwargs)

    return forget_and_call


class State(dict[str, Any]):
    """A parameter's tensors by name, as ``optimizer.state[p]`` has them, and the format of its codes.

    format: None before the first step, when there may be entries of a wrapper already.
    plan: of the parameter's last step (:class:`memkern.optim.plan.StepPlan`), until an entry is replaced. Only states
    hold plans, so that a plan's tensors are freed with them: users move states to the host between two steps.
    """

    format: Format | None = None
    plan: Any = None
    region: Any = None  # the piece of host memory that the entries are in (memkern.optim.offload.device.Region)
    _layout: Any = None  # the parameter's layout at its last step, until an entry is replaced

    __setitem__ = _forgetting_step(dict.__setitem__)
    __delitem__ = _forgetting_step(dict.__delitem__)
    __ior__ = _forgetting_step(dict.__ior__)
    clear = _forgetting_step(dict.clear)
    pop = _forgetting_step(dict.pop)
    popitem = _forgetting_step(dict.popitem)
    setdefault = _forgetting_step(dict.setdefault)
    update = _forgetting_step(dict.update)

    def __getstate__(self) -> dict[str, Any]:
        return {"format": self.format}

    @classmethod
    def of(cls, entries: dict[str, Any], format: Format) -> State:
        """A state of these entries in this format; the entries themselves where they are a state with a format."""
        if isinstance(entries, State) and entries.format is not None:
            return entries
        state = cls(entries)
        state.format = format
        return state

    def replace(self, entries: dict[str, Any], format: Format) -> None:
        """Replaces all entries by ones of this format."""
        self.clear()
        self.update(entries)
        self.format = format

    def note_step(self, p: Tensor, plan: Any) -> None:
        """Notes the plan of a step of the parameter, which it and the entries fit as they are."""
        self.plan, self._layout = plan, _layout(p)

    def is_as_stepped(self, p: Tensor) -> bool:
        """Whether parameter and entries, but for their values, are unchanged since :meth:`note_step`."""
        return self._layout == _layout(p)

    def moved(self, new: Tensor) -> State:
        """The state for the parameter ``new`` in place of its own, on its device and ranks."""
        result, format = State(), self.format
        result.format = format
        if not new.is_meta and any(isinstance(x, Tensor) and x.is_meta for x in self.values()):
            return result  # empty: a step on meta has made no values
        for key, x in self.items():
            if format is None or key not in ENTRIES:  # a wrapper's entry
                result[key] = x
                continue
            if shards.is_dtensor(new) and not shards.is_dtensor(x) and not x.is_contiguous():
                raise ValueError(
                    f"the state of a parameter of shape {tuple(new.shape)} has strides {x.stride()}, and sharded "
                    "params must be contiguous; call .contiguous() before they are sharded"
                )
            x = x if shards.is_dtensor(x) else x.to(new.device)
            result[key] = shards.placed(key, x, new, format.block_size).to(new.device)
        return result


def _layout(p: Tensor) -> Any:
    """What a plan depends on of a parameter."""
    return p.dtype, p.device, p.shape, p.stride()


def _unflatten(values: Iterable[Any], context: tuple[list[str], Format | None]) -> State:
    keys, format = context
    state = State(zip(keys, values, strict=True))
    state.format = format
    return state


# As dicts are registered: torch and its users map functions over the tensors of optimizer.state.
register_pytree_node(State, lambda state: ([*state.values()], ([*state], state.format)), _unflatten)


def has_scales(entries: Iterable[str]) -> bool:
    """Whether a state of these entries has moments as codes."""
    return any(key.endswith("_scale") for key in entries)


def own_entries(state: dict[str, Any]) -> dict[str, Any]:
    """The entries that are memkern's, without a wrapper's."""
    return state if ENTRIES.issuperset(state) else {key: x for key, x in state.items() if key in ENTRIES}


def moment_dtype(p: Tensor) -> torch.dtype:
    """The dtype of moments that are not codes."""
    return arithmetic(p.dtype)


def dense_like(p: Tensor) -> Tensor:
    """A tensor with the strides of a parameter's moments: the parameter, or one on meta where it has gaps."""
    return p if is_dense(p.shape, p.stride()) else torch.empty_like(p, device="meta")


# ---- entries


def state_keys(op: StepOp) -> list[str]:
    """The entries that an op's step takes, without those of ``master_weights``."""
    scales = [f"{name}_scale" for name in op.moments]
    return [*op.moments, *scales, "step", *(["trust_ratio"] if op.has_trust_ratios else [])]


def state_args(op: StepOp, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The states of parameters as arguments of an op (StepArgs)."""
    return {
        "moments": [s[name] for name in op.moments for s in states],
        "scales": [s[f"{name}_scale"] for name in op.moments for s in states if f"{name}_scale" in s],
        "steps": [s["step"] for s in states],
        "trust_ratios": [s["trust_ratio"] for s in states] if op.has_trust_ratios else [],
        "weight_states": [s[key] for s in states for key in weights.KEYS if key in s],
    }


def layers_for_ops(group: dict[str, Any]) -> int:
    """The group's ``layers`` as the number that ops take."""
    return EVERY_ROW if group["layers"] == "rows" else group["layers"]


def count_layers(p: Tensor, group: dict[str, Any]) -> int:
    """How many layers a parameter has, each with a trust ratio of its own."""
    return layer_count(dense_like(p), group["block_size"], layers_for_ops(group))


def _initial_ratios(p: Tensor, group: dict[str, Any]) -> Tensor:
    """The trust ratios before the first step: ones."""
    return torch.ones(count_layers(p, group), dtype=moment_dtype(p), device=p.device)


@torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
def initial_state(op: StepOp, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state before the first step: moments of zero, without scales where they are floats."""
    state: dict[str, Tensor] = {}
    coded = takes_8bit_state(p, group)
    for name, signed in op.moments.items():
        dtype = (torch.int8 if signed else torch.uint8) if coded else moment_dtype(p)
        state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if coded:
        for name in op.moments:
            state[f"{name}_scale"] = shards.new_scale(p, dense_like(p), group["block_size"])
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    state |= weights.initial_state(p, group)
    return state | {"trust_ratio": _initial_ratios(p, group)} if op.has_trust_ratios else state


# ---- moments


def store_moment(
    name: str, x: Tensor, p: Tensor, group: dict[str, Any], step: int, coded: bool | None = None
) -> dict[str, Tensor]:
    """The entries of a moment that is given as floats of the parameter's shape.

    ``coded``: whether to store it in 8 bits; by default as the group does for such a parameter.
    """
    coded = takes_8bit_state(p, group) if coded is None else coded
    x = torch.empty_like(p, dtype=moment_dtype(p), requires_grad=False).copy_(x)
    if name == "exp_avg_sq" and bool((shards.local(x) < 0).any()):
        raise ValueError(f"the second moment of a parameter of shape {tuple(p.shape)} has negative entries")
    if not coded:
        return {name: x}
    codec, signed, block_size = group["codec"], SIGNED[name], group["block_size"]
    rooted = codec == "power" and not signed
    quantize = blocks.quantize if shards.is_dtensor(p) else _ops.quantize_blockwise
    codes, scale = quantize(sqrt(x) if rooted else x, codec, signed, block_size, step)
    return {name: codes, f"{name}_scale": scale}


def load_moment(name: str, state: State) -> Tensor:
    """A moment of a state as new floats, with the strides of the entry."""
    codes, format = state[name], state.format
    if codes.is_floating_point():
        return codes.clone()
    assert format is not None
    scale, codec, block_size = state[f"{name}_scale"], format.codec, format.block_size
    if shards.is_dtensor(codes):
        x = blocks.dequantize(codes, scale, codec, block_size)
    else:
        x = dequantize_blockwise(codes, scale, codec=codec, block_size=block_size)
    return x * x if codec == "power" and codes.dtype == torch.uint8 else x


def misfit(op: StepOp, state: State, p: Tensor) -> tuple[str, str] | None:
    """The key of an entry whose shape or dtype does not fit a parameter, and what is wrong; None if all fit.

    Users who cut or join rows of a parameter, as 3D Gaussian splatting does, edit entries by hand.
    """
    format, entries = state.format, own_entries(state)
    if format is None or shards.is_flat_shard(p):  # FullyShardedDataParallel may have gathered its entries
        return None
    like = state.get(next(iter(op.moments)), p)  # codes may have another memory format than the parameter has now
    layout = layout_of(dense_like(like if like.shape == p.shape else p), format.block_size)
    coded = has_scales(entries)
    # By key, the shape and the dtype that an entry must have; None for any dtype.
    wanted: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(weights.KEYS, (tuple(p.shape), None))
    for name, signed in op.moments.items():
        codes = torch.int8 if signed else torch.uint8
        wanted[name] = (tuple(p.shape), codes if coded else None)
        wanted[f"{name}_scale"] = (layout.scale_shape, torch.float32)
    for key, (shape, dtype) in wanted.items():
        x = entries.get(key)
        if x is None or (tuple(x.shape) == shape and dtype in (None, x.dtype)):
            continue
        advice = (
            "; codes and scales belong to blocks, whose elements cannot be cut out or joined: set state_bits=32 of the "
            "group and call optimizer.state_dict(), which makes floats of them, edit those, and set state_bits back"
        )
        return key, (
            f"must be {'' if dtype is None else f'{dtype} '}of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}"
            + (advice if coded and key not in weights.KEYS else "")
        )
    return None


# ---- conversion


def converted(op: StepOp, state: State, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor] | None:
    """The entries as the parameter and its group ask for them; None if they are so already.

    Codes are read in the state's format and in their own memory format. They stay codes while the group's
    ``state_bits`` is not 32, whatever the parameter's size: shards are smaller than the tensor they were cut from.
    """
    new = _converted_moments(op, state, p, group)
    if op.has_trust_ratios and len(state["trust_ratio"]) != count_layers(p, group):
        return {**(new or state), "trust_ratio": _initial_ratios(p, group)}
    return new


def _converted_moments(op: StepOp, state: State, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor] | None:
    """As :func:`converted`, but the number of trust ratios stays."""
    before, wanted = state.format, Format.of(group)
    assert before is not None
    entries = own_entries(state)
    was_coded = has_scales(entries)
    coded = wanted.has_codes and (was_coded or takes_8bit_state(p, group))
    like = dense_like(p)
    stored = [name for name in op.moments if name in entries]  # amsgrad may have come or gone
    if any(entries[name].shape != p.shape for name in stored):
        return None  # for which the op has an error
    same_layouts = all(same_layout(entries[name], like) for name in stored)
    if coded:
        same_form = was_coded and before._replace(master_weights=None) == wanted._replace(master_weights=None)
    else:
        same_form = all(entries[name].dtype == moment_dtype(p) for name in stored)
    not_moments = {"step", "trust_ratio", *(f"{name}_scale" for name in op.moments), *weights.KEYS}
    weight = weights.convert_storage(p, entries, group)
    same_weight = [*weight] == [key for key in weights.KEYS if key in entries] and all(
        x is entries[key] for key, x in weight.items()
    )
    same_moments = same_layouts and same_form and {*entries} - not_moments == {*op.moments}
    if same_moments and same_weight:
        return None
    foreign = {key: x for key, x in state.items() if key not in entries}  # a wrapper's
    if same_moments:
        return {key: x for key, x in entries.items() if key not in weights.KEYS} | weight | foreign
    step = int(entries["step"]) if "step" in entries else 0
    new: dict[str, Tensor] = {}
    for name in op.moments:
        x = load_moment(name, state) if name in entries else torch.zeros_like(p, dtype=moment_dtype(p))
        new |= store_moment(name, x, p, group, step, coded)
    step_and_ratios = {key: x for key, x in entries.items() if key in ("step", "trust_ratio")}
    if "trust_ratio" in step_and_ratios:
        step_and_ratios["trust_ratio"] = step_and_ratios["trust_ratio"].to(moment_dtype(p))
    moments = {key: new[key] for key in sorted(new, key=lambda key: key.endswith("_scale"))}  # scales after moments
    return {**moments, **step_and_ratios, **weight, **foreign}
