"""Converts state dicts of bitsandbytes' Adam, AdamW and Lion to memkern's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...quant.codec import dynamic_map, dynamic_zero
from ...quant.layout import layout_of
from .. import weights
from ..adam import Adam
from ..base import BlockwiseOptimizer
from ..format import Format, takes_8bit_state
from ..lion import Lion
from ..state import store_moment
from .states import (
    check_keys,
    check_moment,
    check_optimizer,
    import_entries,
    import_groups,
    loadable,
    step_number,
)

BNB_WRAPPED = "__bnb_optimizer_quant_state__"  # where newer versions put all tensors of a parameter's state
BNB_BLOCK = 256  # elements that share a scale
BNB_OLD_BLOCK = 2048  # the same up to version 0.43
BNB_SUFFIX = {"exp_avg": "1", "exp_avg_sq": "2"}  # of a moment's keys: state1, qmap1, absmax1; state2, ...


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
    check_optimizer(optimizer, Adam, Lion)
    entries = import_entries(optimizer, state_dict)
    decay = {"decoupled_weight_decay": True} if isinstance(optimizer, Adam) else {}
    groups = import_groups(optimizer, state_dict, **decay)
    state: dict[Any, dict[str, Tensor]] = {}
    for i, p, group, values in entries:
        where = f'state_dict["state"][{i!r}]'
        values = {**values, **values.get(BNB_WRAPPED, {})}
        check_keys(where, values, [f"state{BNB_SUFFIX[name]}" for name in optimizer.moments])
        if "state2" in values and "exp_avg_sq" not in optimizer.moments:
            kind = type(optimizer).__name__
            raise ValueError(f"{where} has state2, a second moment, which {kind} does not have")
        if not isinstance(optimizer, Lion):
            check_keys(where, values, ["step"])
        step = step_number(where, values.get("step", 0))
        state[i] = {"step": torch.tensor(step, dtype=torch.float32, device="cpu")}
        for name in optimizer.moments:
            state[i] |= _from_bnb(where, name, values, p, group, int(step))
        state[i] |= weights.initial_state(p, group)
    return loadable(state, groups)


def same_blocks(x: Tensor, format: Format) -> bool:
    """Whether a format's codes of a tensor are bitsandbytes': the same map, on the same runs of elements."""
    if format.codec != "dynamic" or not x.is_contiguous():
        return False
    layout = layout_of(x, format.block_size)
    return layout.block == BNB_BLOCK and (layout.segment == layout.numel or layout.segment % BNB_BLOCK == 0)


def _from_bnb(
    where: str, name: str, values: dict[str, Any], p: Tensor, group: dict[str, Any], step: int
) -> dict[str, Tensor]:
    """A moment of bitsandbytes' as the optimizer keeps it: its entries in the optimizer's state."""
    suffix, signed = BNB_SUFFIX[name], name == "exp_avg"
    data = values[f"state{suffix}"]
    check_moment(f"{where}['state{suffix}']", data, p, or_uint8=True)
    if not data.is_contiguous():
        raise ValueError(
            f"{where}['state{suffix}'] is not contiguous; bitsandbytes orders such a state by place in memory on "
            "a GPU and by index on the CPU: make it contiguous in the order that it was trained in"
        )
    if data.dtype != torch.uint8:
        return store_moment(name, data, p, group, step)
    check_keys(where, values, [f"qmap{suffix}", f"absmax{suffix}"])
    table, scale = (values[f"{key}{suffix}"].to(p.device, torch.float32) for key in ("qmap", "absmax"))
    block_of_count = {-(-data.numel() // size): size for size in (BNB_OLD_BLOCK, BNB_BLOCK)}  # by the number of scales
    if table.shape != (256,) or scale.dim() != 1 or scale.numel() not in block_of_count:
        raise ValueError(
            f"{where} must have qmap{suffix} of 256 entries and absmax{suffix} of {-(-data.numel() // BNB_BLOCK)}, one "
            f"per block of {BNB_BLOCK} elements, got {tuple(table.shape)} and {tuple(scale.shape)}"
        )
    block = block_of_count[scale.numel()]
    data = data.to(p.device)
    own_map = torch.tensor(dynamic_map(signed), dtype=torch.float32, device=p.device)
    blocks_fit = takes_8bit_state(p, group) and same_blocks(p, Format.of(group))
    if block == BNB_BLOCK and blocks_fit and torch.equal(table, own_map):
        codes = data - dynamic_zero(signed)  # modulo 256, as uint8 does
        scale = scale.reshape(layout_of(p, group["block_size"]).scale_shape).clone()
        return {name: codes.view(torch.int8) if signed else codes, f"{name}_scale": scale}
    x = table.index_select(0, data.reshape(-1).int())
    x *= scale.repeat_interleave(block)[: x.numel()]
    return store_moment(name, x.reshape(p.shape), p, group, step)
