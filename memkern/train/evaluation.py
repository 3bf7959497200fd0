"""The validation loss of a run, or of a model that is not trained, whose weights may stay in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..applying import autocast
from ..options import OptionError
from .build import Source, build_objective, resolve_device
from .config import TrainConfig
from .data import Batch
from .objective import Objective


@torch.no_grad()
def validate(
    objective: Objective,
    batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> float:
    """The mean loss of the batches' targets, in nats. total: sums over the processes."""
    training = objective.training
    objective.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # losses, targets
    for batch in batches:
        sums += torch.tensor([loss(*batch).item(), batch.predicted], dtype=torch.float64)
    objective.train(training)
    losses, count = total(sums).tolist()
    return losses / count


def check_on_host(config: TrainConfig, on_host: str | None) -> None:
    """Raises OptionError where weights cannot stay on the host."""
    if on_host is not None and config.is_preset:
        text = f"{on_host!r} given with --model {config.model}; allowed with models of transformers"
        raise OptionError("weights_on_host", text)
    if on_host == "layers" and config.techniques.loss_chunk is not None:
        raise OptionError("loss_chunk", "given with --weights-on-host layers; allowed: without, or with model")


def evaluate(config: TrainConfig, source: Source, on_host: str | None = None) -> float:
    """The validation loss of a model that is not trained.

    on_host: "layers", each layer's weights are on the device while it runs (accelerate.cpu_offload); "model", all of
    them while the model runs (accelerate.cpu_offload_with_hook), and on the host again afterwards.
    """
    check_on_host(config, on_host)
    # Nothing is saved, and each block runs a few times.
    config = config.replace(compile=False, saved_bits=None, memory_budget=None)
    device = resolve_device(config)
    torch.manual_seed(config.seed)
    objective = build_objective(config, source, device if on_host is None else torch.device("cpu"))
    objective.eval()
    hook: Any = None
    if on_host == "layers":
        from accelerate import cpu_offload

        cpu_offload(objective.model, device)
    elif on_host == "model":
        from accelerate import cpu_offload_with_hook

        _, hook = cpu_offload_with_hook(objective.model, device)

    def loss(*batch: Tensor) -> Tensor:
        with autocast(config.techniques, device.type):
            return objective(*(tensor.to(device) for tensor in batch))

    found = validate(objective, source.corpus.validation_batches(config), loss)
    if hook is not None:
        hook.offload()
    return found
