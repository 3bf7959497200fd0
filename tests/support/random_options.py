"""Options of an optimizer's groups as users set them between two steps, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

OPTIONS: dict[str, list[Any]] = {
    "lr": [1e-3, 1e-2],
    "weight_decay": [0.0, 0.1],
    "betas": [(0.9, 0.99), (0.5, 0.9)],
    "codec": ["power", "dynamic"],
    "block_size": [64, 128],
    "state_bits": [8, 32],
    "min_8bit_size": [0, 4096],
    "max_grad_norm": [None, 0.1],
    "amsgrad": [False, True],
}


def set_option(
    choice: random.Random,
    groups: Sequence[dict[str, Any]],
    options: Mapping[str, Sequence[Any]],
    but: Collection[str] = (),
) -> None:
    """Sets an option in all groups that have it, or in one group; nothing where it is one of ``but``."""
    name = choice.choice([*options])
    value = choice.choice(options[name])
    if name in but:
        return
    if name != "max_grad_norm" and choice.random() < 0.4:  # of all groups
        groups = [choice.choice(groups)]
    for group in groups:
        if name in group:
            group[name] = value
