"""State dicts of torch.optim and bitsandbytes, to memkern's and back.

A converted state continues the training that it came from: the same moments, up to the error of the codes
that they move into, the same step counts, the same hyperparameters. Parameters are matched by their place, so
both optimizers are built over the same ones in the same order. No function here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..blockwise import dequantize_blockwise, quantize_blockwise
from ..codec import dynamic_map, dynamic_zero
from ..layout import layout_of
from ..reference.blockwise import sqrt
from .adam import Adam
from .base import BlockwiseOptimizer, takes_8bit_state
from .lion import Lion

# memkern's own, which no other state has (torch.optim's capturable is the caller's choice)
OPTIONS = ("state_bits", "block_size", "codec", "min_8bit_size", "max_grad_norm", "capturable")
TORCH_ONLY = {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
BNB_ONLY = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # AdEMAMix's, in every group

BNB_WRAPPED = "__bnb_optimizer_quant_state__"  # where newer versions put all tensors of a parameter's state
BNB_BLOCK = 256
BNB_OLD_BLOCK = 2048  # up to version 0.43
BNB_SUFFIX = {"exp_avg": "1", "exp_avg_sq": "2"}

Entry = tuple[Any, Tensor, dict[str, Any], dict[str, Any]]  # key, parameter, memkern's group, state


@torch.no_grad()
def from_torch_state_dict(optimizer: Adam, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch.optim.AdamW or Adam as one that ``optimizer.load_state_dict`` takes.

    Args:
        optimizer: memkern's Adam, AdamW, Adam8bit or AdamW8bit over the same parameters in the same order;
            not changed. Its groups say how states are stored (state_bits, block_size, codec, min_8bit_size).
        state_dict: of torch.optim.AdamW or Adam, foreach, fused and capturable too: ``exp_avg`` and
            ``exp_avg_sq`` of the parameter's shape in any floating-point dtype, and ``step``.

    Returns:
        A state dict of new tensors. ``step`` is float32 on the CPU. Moments that the group stores in 8 bits
        become codes (``exp_avg`` int8, ``exp_avg_sq`` uint8, shape and strides of the parameter) and scales
        (float32), rounded as the optimizer would have rounded them at that step; the others are float32. lr,
        betas, eps, weight_decay, maximize, decoupled_weight_decay and what schedulers add come from
        ``state_dict``; foreach, fused, capturable and differentiable are left out. A parameter that has no
        state yet has none after.

    Raises:
        TypeError: ``optimizer`` is not memkern's Adam, or an entry of the state is not what torch.optim
            makes.
        ValueError: the state does not fit the parameters, has amsgrad, or has negative second moments.
    """
    _check_optimizer(optimizer, Adam)
    entries = _entries(optimizer, state_dict)
    for k, group in enumerate(state_dict["param_groups"]):
        if group.get("amsgrad"):
            raise ValueError(
                f'state_dict["param_groups"][{k}] has amsgrad=True, which memkern.optim does not support; '
                "only a state without it converts"
            )
    groups = _groups_from(optimizer, state_dict)
    state = {}
    for i, p, group, values in entries:
        where = f'state_dict["state"][{i!r}]'
        _check_keys(where, values, [*optimizer.moments, "step"])
        step = _step(where, values["step"])
        state[i] = {"step": torch.tensor(step, dtype=torch.float32)}
        for name in optimizer.moments:
            x = values[name]
            _check_moment(f"{where}[{name!r}]", x, p)
            state[i] |= _store(name, x, p, group, int(step))
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def to_torch_state_dict(optimizer: Adam) -> dict[str, Any]:
    """The optimizer's state as one that torch.optim.AdamW or Adam over the same parameters takes.

    Args:
        optimizer: memkern's Adam, AdamW, Adam8bit or AdamW8bit. The result is for torch.optim.AdamW where its
            groups decay decoupled, else for torch.optim.Adam.

    Returns:
        A state dict of new tensors: ``exp_avg`` and ``exp_avg_sq`` float32 with the parameter's shape and
        strides (torch.optim rounds them to the parameter's dtype when it loads them), ``step`` float32 on the
        CPU. 32-bit states are exact, 8-bit ones the values of their codes. foreach, fused and capturable are
        torch's defaults.

    Raises:
        TypeError: ``optimizer`` is not memkern's Adam.
    """
    _check_optimizer(optimizer, Adam)
    state = {
        i: {
            "step": values["step"].detach().to("cpu", copy=True),
            **{name: _load(name, values, group) for name in optimizer.moments},
        }
        for i, _, group, values in _own_entries(optimizer)
    }
    return {"state": state, "param_groups": _groups_to(optimizer, TORCH_ONLY)}


@torch.no_grad()
def from_bitsandbytes_state_dict(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of bitsandbytes' Adam, AdamW or Lion as one that ``optimizer.load_state_dict`` takes.

    Args:
        optimizer: memkern's Adam, AdamW or Lion, over the same parameters in the same order; not changed. Its
            groups say how states are stored (state_bits, block_size, codec, min_8bit_size).
        state_dict: of AdamW8bit, Adam8bit, Lion8bit, their paged or their 32-bit forms: ``step`` and, beside
            it or inside ``"__bnb_optimizer_quant_state__"``, ``state1`` (m) and ``state2`` (v; not for Lion)
            of the parameter's shape. Either float32, or uint8 indices into ``qmap1`` and ``qmap2`` (256
            float32) with ``absmax1`` and ``absmax2`` (float32, one per block of 256 elements in row-major
            order; 2048 in states of versions up to 0.43).

    Returns:
        A state dict as from :func:`from_torch_state_dict`. Codes and scales move over as they are where
        ``codec="dynamic"`` and the blocks are the same runs of 256 elements: ``block_size=256``, a contiguous
        parameter, and as many elements per row (of the first dimension) as divide 256 or as 256 divides.
        Otherwise they are decoded and coded anew. lr, betas, eps, weight_decay and what schedulers add come
        from ``state_dict``. All of bitsandbytes' Adams decay decoupled: so does the result, Adam's too.

    Raises:
        TypeError: ``optimizer`` is not memkern's, or an entry of the state is not what bitsandbytes makes.
        ValueError: the state does not fit the optimizer or its parameters, or is not block-wise.
    """
    _check_optimizer(optimizer, Adam, Lion)
    entries = _entries(optimizer, state_dict)
    decay = {"decoupled_weight_decay": True} if isinstance(optimizer, Adam) else {}
    groups = _groups_from(optimizer, state_dict, **decay)
    state: dict[Any, dict[str, Tensor]] = {}
    for i, p, group, values in entries:
        where = f'state_dict["state"][{i!r}]'
        values = {**values, **values.get(BNB_WRAPPED, {})}
        _check_keys(where, values, [f"state{BNB_SUFFIX[name]}" for name in optimizer.moments])
        if "state2" in values and "exp_avg_sq" not in optimizer.moments:
            kind = type(optimizer).__name__
            raise ValueError(f"{where} has state2, a second moment, which {kind} does not have")
        step, state[i] = 0.0, {}
        if optimizer.has_step:
            _check_keys(where, values, ["step"])
            step = _step(where, values["step"])
            state[i]["step"] = torch.tensor(step, dtype=torch.float32)
        for name in optimizer.moments:
            state[i] |= _from_bnb(where, name, values, p, group, int(step))
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def to_bitsandbytes_state_dict(optimizer: BlockwiseOptimizer) -> dict[str, Any]:
    """The optimizer's state as one that bitsandbytes' optimizer of the same kind takes.

    Args:
        optimizer: memkern's Adam, AdamW or Lion. The result is for bitsandbytes' Adam8bit or AdamW8bit (to
            them the same thing), or Lion8bit, over the same parameters in the same order.

    Returns:
        A state dict of new tensors: ``step`` (int; 0 for Lion, which does not read it), ``state1`` (m) and
        ``state2`` (v; not for Lion) of the parameter's shape, contiguous. 8-bit states are uint8 with
        ``qmap1``, ``qmap2`` (256 float32), ``absmax1`` and ``absmax2`` (float32, one per 256 elements), moved
        as they are or coded anew as for :func:`from_bitsandbytes_state_dict`. 32-bit states stay float32, in
        which bitsandbytes continues them.

    Raises:
        TypeError: ``optimizer`` is not memkern's.
        ValueError: a group maximizes or has coupled weight decay; bitsandbytes can do neither.
    """
    _check_optimizer(optimizer, Adam, Lion)
    for n, group in enumerate(optimizer.param_groups):
        if group["maximize"]:
            raise ValueError(f"group {n} has maximize=True, which bitsandbytes does not have")
        if group["weight_decay"] != 0 and not group.get("decoupled_weight_decay", True):
            raise ValueError(
                f"group {n} has coupled weight_decay={group['weight_decay']}, and bitsandbytes' Adams decay "
                "decoupled; weight_decay must be 0 or decoupled_weight_decay True"
            )
    maps: dict[tuple[bool, torch.device], Tensor] = {}
    state: dict[Any, dict[str, Any]] = {}
    for i, p, group, values in _own_entries(optimizer):
        state[i] = {"step": int(values["step"]) if optimizer.has_step else 0}
        for name, dtype in optimizer.moments.items():
            codes, k, signed = values[name], BNB_SUFFIX[name], dtype == torch.int8
            if codes.dtype == torch.float32:
                state[i][f"state{k}"] = codes.clone(memory_format=torch.contiguous_format)
                continue
            scale = values[f"{name}_scale"].clone()
            if not _same_blocks(p, group):
                flat = _load(name, values, group).reshape(-1)  # row-major, whatever the strides
                codes, scale = quantize_blockwise(flat, codec="dynamic", signed=signed, block_size=BNB_BLOCK)
            if (signed, p.device) not in maps:
                maps[signed, p.device] = torch.tensor(dynamic_map(signed), device=p.device)
            state[i] |= {
                f"state{k}": (codes.view(torch.uint8) + dynamic_zero(signed)).reshape(p.shape),
                f"qmap{k}": maps[signed, p.device],
                f"absmax{k}": scale.reshape(-1),
            }
    groups = _groups_to(optimizer, {} if isinstance(optimizer, Lion) else BNB_ONLY)
    for saved in groups:
        saved |= {"lr": float(saved["lr"]), "eps": saved.get("eps", 0.0)}
        for option in ("maximize", "decoupled_weight_decay"):
            saved.pop(option, None)
    return {"state": state, "param_groups": groups}


# ---- one moment


def _store(name: str, x: Tensor, p: Tensor, group: dict[str, Any], step: int) -> dict[str, Tensor]:
    """A moment, given as floats of the parameter's shape, as the optimizer keeps it."""
    x = torch.empty_like(p, dtype=torch.float32, requires_grad=False).copy_(x)
    if name == "exp_avg_sq" and bool((x < 0).any()):
        raise ValueError(f"the second moment of a parameter of shape {tuple(p.shape)} has negative entries")
    if not takes_8bit_state(p, group):
        return {name: x}
    codec, signed = group["codec"], name == "exp_avg"
    rooted = codec == "power" and not signed
    codes, scale = quantize_blockwise(
        sqrt(x) if rooted else x,
        codec=codec,
        signed=signed,
        block_size=group["block_size"],
        step=step if rooted else None,
    )
    return {name: codes, f"{name}_scale": scale}


def _load(name: str, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """A moment of memkern's as new float32 values with the parameter's shape and strides."""
    codes, codec = state[name], group["codec"]
    if codes.dtype == torch.float32:
        return codes.clone()
    x = dequantize_blockwise(codes, state[f"{name}_scale"], codec=codec, block_size=group["block_size"])
    return x * x if codec == "power" and codes.dtype == torch.uint8 else x


def _same_blocks(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether the group stores the parameter as bitsandbytes does: its map, on the same runs of elements."""
    if group["codec"] != "dynamic" or not takes_8bit_state(p, group) or not p.is_contiguous():
        return False
    layout = layout_of(p, group["block_size"])
    return layout.block == BNB_BLOCK and (layout.segment == layout.numel or layout.segment % BNB_BLOCK == 0)


def _from_bnb(
    where: str, name: str, values: dict[str, Any], p: Tensor, group: dict[str, Any], step: int
) -> dict[str, Tensor]:
    """A moment of bitsandbytes' as the optimizer keeps it."""
    k, signed = BNB_SUFFIX[name], name == "exp_avg"
    data = values[f"state{k}"]
    _check_moment(f"{where}['state{k}']", data, p, or_uint8=True)
    if not data.is_contiguous():
        raise ValueError(
            f"{where}['state{k}'] is not contiguous; bitsandbytes orders such a state by place in memory on "
            "a GPU and by index on the CPU: make it contiguous in the order that it was trained in"
        )
    if data.dtype != torch.uint8:
        return _store(name, data, p, group, step)
    _check_keys(where, values, [f"qmap{k}", f"absmax{k}"])
    table, scale = (values[f"{key}{k}"].to(p.device, torch.float32) for key in ("qmap", "absmax"))
    counts = {-(-data.numel() // size): size for size in (BNB_OLD_BLOCK, BNB_BLOCK)}
    if table.shape != (256,) or scale.dim() != 1 or scale.numel() not in counts:
        raise ValueError(
            f"{where} must have qmap{k} of 256 entries and absmax{k} of {-(-data.numel() // BNB_BLOCK)}, one "
            f"per block of {BNB_BLOCK} elements, got {tuple(table.shape)} and {tuple(scale.shape)}"
        )
    block = counts[scale.numel()]
    data = data.to(p.device)
    own = torch.tensor(dynamic_map(signed), device=p.device)
    if block == BNB_BLOCK and _same_blocks(p, group) and torch.equal(table, own):
        codes = data - dynamic_zero(signed)  # modulo 256, as uint8 does
        scale = scale.reshape(layout_of(p, group["block_size"]).scale_shape).clone()
        return {name: codes.view(torch.int8) if signed else codes, f"{name}_scale": scale}
    x = table.index_select(0, data.reshape(-1).int())
    x *= scale.repeat_interleave(block)[: x.numel()]
    return _store(name, x.reshape(p.shape), p, group, step)


# ---- groups and entries


def _groups_from(
    optimizer: BlockwiseOptimizer, state_dict: dict[str, Any], **fixed: Any
) -> list[dict[str, Any]]:
    """The given state's groups, with memkern's options from the optimizer's."""
    groups = []
    wanted = {"lr", "betas", "eps", "weight_decay"} & {*optimizer.defaults}
    left_out = {*OPTIONS, *TORCH_ONLY, *BNB_ONLY, *({"eps"} - wanted)}
    for k, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        _check_keys(f'state_dict["param_groups"][{k}]', saved, sorted(wanted))
        groups.append(
            {
                **{key: own[key] for key in optimizer.defaults if key in own},
                **{key: value for key, value in saved.items() if key not in left_out},
                "betas": tuple(float(b) for b in saved["betas"]),
                "params": list(saved["params"]),
                **fixed,
            }
        )
    return groups


def _groups_to(optimizer: BlockwiseOptimizer, added: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's groups without memkern's options, parameters numbered as state_dict() does."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key not in (*OPTIONS, "params")}
        count = len(group["params"])
        groups.append({**kept, **added, "params": list(range(first, first + count))})
        first += count
    return groups


def _own_entries(optimizer: BlockwiseOptimizer) -> Iterator[Entry]:
    """Every parameter that has a state, numbered as state_dict() does."""
    pairs = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, (p, group) in enumerate(pairs):
        if values := optimizer.state.get(p):
            yield i, p, group, values


def _entries(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> list[Entry]:
    """Every parameter that the given state has an entry for."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= {*state_dict}:
        got = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise TypeError(f"state_dict must be an optimizer's, with state and param_groups, got {got}")
    groups = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in groups)
    if sizes != saved_sizes:
        raise ValueError(
            f"state_dict must have groups of {sizes} parameters, as optimizer, got {saved_sizes}"
        )
    pairs = zip(*groups, strict=True)
    places = [
        (i, p, own) for own, saved in pairs for i, p in zip(saved["params"], own["params"], strict=True)
    ]
    if extra := {*state_dict["state"]} - {i for i, _, _ in places}:
        raise ValueError(f'state_dict["state"] has entries of no parameter: {sorted(extra, key=str)}')
    return [(i, p, group, state_dict["state"][i]) for i, p, group in places if state_dict["state"].get(i)]


# ---- checks


def _check_optimizer(optimizer: Any, *kinds: type) -> None:
    if not isinstance(optimizer, kinds):
        names = " or ".join(f"memkern.optim.{kind.__name__}" for kind in kinds)
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise TypeError(f"optimizer must be a {names}, got {got}")


def _check_keys(where: str, values: dict[str, Any], keys: list[str]) -> None:
    if missing := [key for key in keys if key not in values]:
        raise ValueError(f"{where} must have {', '.join(missing)}, got only {', '.join(map(str, values))}")


def _check_moment(where: str, x: Any, p: Tensor, or_uint8: bool = False) -> None:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or (or_uint8 and x.dtype == torch.uint8)):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        wanted = "floating-point or uint8" if or_uint8 else "floating-point"
        raise TypeError(f"{where} must be a {wanted} tensor, got {got}")
    if x.shape != p.shape:
        raise ValueError(f"{where} must have its parameter's shape {tuple(p.shape)}, got {tuple(x.shape)}")


def _step(where: str, step: Any) -> float:
    number = float(step) if not isinstance(step, Tensor) or step.numel() == 1 else -1.0
    if not number >= 0 or number % 1 != 0:
        raise ValueError(f"{where}['step'] must be one whole number, 0 or more, got {step}")
    return number
