"""State dicts of a model and its optimizer for torch.distributed.checkpoint, and loading them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def state_of(model: nn.Module, optimizer: Any, options: Any = None) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    """Loads a checkpoint into a model whose parameters become NaN before, so that one that is not loaded shows."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optim"])
