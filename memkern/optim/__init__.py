"""Drop-in optimizers with block-wise 8-bit or 32-bit states, and converters of other libraries' states."""

from .adam import Adam, Adam8bit, AdamW, AdamW8bit
from .backward import StepInBackward
from .convert import (
    from_bitsandbytes_state_dict,
    from_torch_state_dict,
    to_bitsandbytes_state_dict,
    to_torch_state_dict,
)
from .groups import param_groups
from .lamb import LAMB, LAMB8bit
from .lars import LARS, LARS8bit
from .lion import Lion, Lion8bit

__all__ = [
    "LAMB",
    "LARS",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "LAMB8bit",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "StepInBackward",
    "from_bitsandbytes_state_dict",
    "from_torch_state_dict",
    "param_groups",
    "to_bitsandbytes_state_dict",
    "to_torch_state_dict",
]
