"""Drop-in optimizers with block-wise 8-bit or 32-bit states, and converters of other libraries' states."""

from .adam import Adam, Adam8bit, AdamW, AdamW8bit
from .backward import StepInBackward
from .convert import (
    from_bitsandbytes_state_dict,
    from_torch_muon_state_dict,
    from_torch_state_dict,
    load_fp32_state_dict,
    to_fp32_state_dict,
    to_torch_state_dict,
)
from .foreign import GlobalOptimManager as GlobalOptimManager  # not in __all__: every use of it raises
from .groups import muon_groups, param_groups
from .lamb import LAMB, LAMB8bit
from .lars import LARS, LARS8bit
from .lion import Lion, Lion8bit
from .muon import Muon, Muon8bit
from .offload.host import HostOffload
from .sgd import SGD, SGD8bit

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "HostOffload",
    "LAMB8bit",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "Muon",
    "Muon8bit",
    "SGD8bit",
    "StepInBackward",
    "from_bitsandbytes_state_dict",
    "from_torch_muon_state_dict",
    "from_torch_state_dict",
    "load_fp32_state_dict",
    "muon_groups",
    "param_groups",
    "to_fp32_state_dict",
    "to_torch_state_dict",
]
