"""How an optimizer stores bf16 parameters: the options ``master_weights`` and ``stochastic_rounding``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..quant.codec import WEIGHT_DROPPED_BITS, WEIGHTS
from ..reference.weights import bits_of, float_of, join_weight, kept_weight, split_weight
from .sharding import local, placed

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer
    from .host import HostOffload

Group = dict[str, Any]

MASTER_WEIGHTS = {
    None: {},
    "fp32": {"master_weight": torch.float32},
    "bf16+16": {"weight_error": torch.int16},
    "bf16+8": {"weight_error": torch.int8},
}
"""Values of ``master_weights``, and the entry that each adds to a parameter's state."""
KEYS = ("weight_error", "master_weight")


def check_options(group: Group) -> None:
    """Raises ValueError unless the two options are allowed, together too."""
    master, stochastic = group["master_weights"], group["stochastic_rounding"]
    if master not in [*MASTER_WEIGHTS]:
        raise ValueError(
            f"master_weights must be one of {', '.join(map(repr, MASTER_WEIGHTS))}, got {master!r}"
        )
    if not isinstance(stochastic, bool):
        raise ValueError(f"stochastic_rounding must be True or False, got {stochastic!r}")
    if stochastic and master is not None:
        raise ValueError(
            f"stochastic_rounding=True is for weights whose rounding error is not kept, got master_weights={master!r}; "
            "leave one of them out"
        )


def check_param(p: Tensor, group: Group) -> None:
    """Raises TypeError where the group stores weights in a way that is for bf16 alone."""
    for name in ("master_weights", "stochastic_rounding"):
        if group[name] and p.dtype != torch.bfloat16:
            raise TypeError(
                f"{name}={group[name]!r} is for bfloat16 parameters, got {p.dtype} of shape {tuple(p.shape)}: it "
                "stores what rounding to bfloat16 loses; put other parameters into a group without it"
            )


def storage_of(group: Group) -> int:
    """The group's ``weight_storage``, as the ops take it."""
    return WEIGHTS[group["master_weights"] or ("stochastic" if group["stochastic_rounding"] else "nearest")]


def keys_of(group: Group) -> list[str]:
    """The entries that the group's ``master_weights`` adds to a state."""
    return [*MASTER_WEIGHTS[group["master_weights"]]]


def initial_state(p: Tensor, group: Group) -> dict[str, Tensor]:
    """The entries of a parameter that has not stepped yet: no error, its value in fp32."""
    return {
        key: torch.zeros_like(p, dtype=dtype, requires_grad=False)
        if key == "weight_error"
        else torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(p.detach())
        for key, dtype in MASTER_WEIGHTS[group["master_weights"]].items()
    }


def fp32_weight(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """What a step would read: a parameter with what its state keeps of it, as new fp32 values of its strides."""
    p = p.detach()
    found, own = torch.empty_like(p, dtype=torch.float32), local(p)
    if (master := state.get("master_weight")) is not None:
        x = kept_weight(own, local(master))
    elif (error := state.get("weight_error")) is not None:
        dropped = WEIGHT_DROPPED_BITS["bf16+8" if error.dtype == torch.int8 else "bf16+16"]
        x = join_weight(own, local(error), dropped)
    else:
        x = own
    local(found).copy_(x)
    return found


def state_from_fp32(p: Tensor, x: Tensor, group: Group) -> dict[str, Tensor]:
    """What the group's ``master_weights`` keeps of fp32 weights ``x`` beside ``p``, which x rounds to and which stays.

    In 8 bits the error is rounded to the nearest, and is at most 127 units. In fp32 a tie, which an error may stand for
    and which rounds to another bf16 value than p, becomes its neighbour on p's side: a copy must round to p to count.
    """
    state = initial_state(p, group)
    p, x = local(p.detach()).float(), local(x).float()
    if "master_weight" in state:
        side = (bits_of(p) - bits_of(x)).sign()
        counts = bits_of(kept_weight(p, x)) == bits_of(x)
        local(state["master_weight"]).copy_(torch.where(counts, x, float_of(bits_of(x) + side)))
    elif "weight_error" in state:
        dropped = WEIGHT_DROPPED_BITS[group["master_weights"]]
        error = bits_of(x) - bits_of(p)
        error = (error + (1 << dropped >> 1) >> dropped).clamp(max=(2**15 >> dropped) - 1)
        local(state["weight_error"]).copy_(torch.where(p.isfinite(), error, 0))
    return state


def restored(p: Tensor, state: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """The entries as the group asks for them: the state's own where they are so already."""
    wanted = MASTER_WEIGHTS[group["master_weights"]]
    own = {key: state[key] for key in KEYS if key in state}
    if {key: x.dtype for key, x in own.items()} == wanted and all(x.shape == p.shape for x in own.values()):
        like = {key: torch.empty_like(p, dtype=x.dtype, requires_grad=False) for key, x in own.items()}
        if all(x.stride() == like[key].stride() for key, x in own.items()):
            return own
        return {key: like[key].copy_(x) for key, x in own.items()}
    return state_from_fp32(p, fp32_weight(p, state), group)


# ---- fp32 weights of a whole model


def _check_model(model: Any, optimizer: Any) -> None:
    from .base import BlockwiseOptimizer
    from .host import HostOffload

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, (BlockwiseOptimizer, HostOffload)):
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise TypeError(f"optimizer must be one of memkern.optim's, got {got}")
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    if stepped and not any(p in stepped for p in model.parameters()):
        raise ValueError(
            "optimizer must step parameters of model, and none of its is one: is model a copy, or optimizer the inner "
            "one of a HostOffload? Give the model that is trained and the optimizer that was made of its parameters"
        )


def _host_weight(optimizer: Any, p: Tensor) -> Tensor | None:
    """HostOffload's own fp32 weight of a half-precision parameter, which an inner optimizer's state does not keep."""
    weight = getattr(optimizer, "_weights", {}).get(p)
    return weight.home.detach() if weight is not None and weight.home.dtype != p.dtype else None


@torch.no_grad()
def to_fp32_state_dict(model: nn.Module, optimizer: BlockwiseOptimizer | HostOffload) -> dict[str, Tensor]:
    """``model.state_dict()`` with its bf16 parameters in fp32, as the optimizer knows them.

    Args:
        model: whose parameters the optimizer steps; not changed.
        optimizer: with ``master_weights`` "fp32" or "bf16+16" the result is exact, with "bf16+8" it has 24 bits. A
            parameter without (another group, no step yet) is its bf16 value, and so is an element that is 0, or whose
            fp32 copy does not round to it, as something else has written it since; errors count whoever has written
            the weight. Of HostOffload the host's weights, those of an fp16 model too.

    Returns:
        A state dict of the model's: new float32 tensors for bf16 parameters; the others and buffers as they are.

    Raises:
        TypeError: another kind of model or optimizer.
        ValueError: the optimizer steps no parameter of the model, as where the model is a copy.
    """
    _check_model(model, optimizer)
    state_dict = model.state_dict()
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in state_dict:
            continue
        if (home := _host_weight(optimizer, p)) is not None:
            x = home.to(p.device, torch.float32)
            state_dict[name] = torch.where(x.to(p.dtype) == p, x, p.detach().float())
        elif p.dtype == torch.bfloat16:
            kept = {key: x.to(p.device) for key, x in optimizer.state.get(p, {}).items() if key in KEYS}
            state_dict[name] = x = fp32_weight(p, kept)
            own = local(p.detach())  # what is kept beside a zero is at most 4.6e-41
            local(x).copy_(torch.where(own == 0, own.float(), local(x)))
    return state_dict


@torch.no_grad()
def load_fp32_state_dict(
    model: nn.Module, optimizer: BlockwiseOptimizer, state_dict: dict[str, Tensor]
) -> None:
    """Loads fp32 weights into a bf16 model and its optimizer: the inverse of :func:`to_fp32_state_dict`.

    Args:
        model: gets ``state_dict``; its bf16 parameters are rounded to the nearest.
        optimizer: parameters in groups with ``master_weights`` get their errors or fp32 copies, exact but with
            "bf16+8", whose 24 bits are rounded to the nearest. One that has not stepped yet gets a state of zeros.
        state_dict: for ``model.load_state_dict``, all keys.

    Raises:
        TypeError: another kind of model or optimizer. HostOffload: load into the model and the optimizer's class, and
            give its state_dict() to a new HostOffload.
        ValueError: the optimizer steps no parameter of the model.
        RuntimeError: what ``model.load_state_dict`` raises; nothing of the optimizer is changed then.
    """
    _check_model(model, optimizer)
    if hasattr(optimizer, "inner"):
        raise TypeError(
            "optimizer must not be HostOffload: load into the model and an optimizer of its class, and give that one's "
            "state_dict() to HostOffload.load_state_dict"
        )
    model.load_state_dict(state_dict)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters(remove_duplicate=False):
        group = groups.get(p)
        if group is None or group["master_weights"] is None or name not in state_dict:
            continue
        x = state_dict[name].to(p.device, torch.float32)
        if not optimizer.state.get(p):
            optimizer.state[p] = optimizer._init_state(p, group)
        if (dropped := WEIGHT_DROPPED_BITS.get(group["master_weights"])) is None:
            p.copy_(x)
            optimizer.state[p]["master_weight"].copy_(x)
        else:
            x = placed("weight_error", x, p, group["block_size"])
            weight, error = split_weight(local(x), 1 << dropped >> 1, dropped)
            local(p).copy_(weight)
            local(optimizer.state[p]["weight_error"]).copy_(error)
