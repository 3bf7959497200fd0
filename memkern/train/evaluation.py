"""The validation loss of a run, or of a model that is not trained, whose weights may stay in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..applying import autocast
from ..options import OptionError
from .build import Source, build_objective, resolve_device
from .config import TrainConfig
from .data import Batch
from .objective import Classifier, Objective


class Validation(NamedTuple):
    """loss: the mean over the targets, nats. accuracy: the share of classes that were found; None without classes."""

    loss: float
    accuracy: float | None


@torch.no_grad()
def validate(
    objective: Objective,
    batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Validation:
    """The mean over the batches. total: sums over the processes."""
    training = objective.training
    objective.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # losses, correct classes, targets
    for batch in batches:
        value = loss(*batch).item()
        correct = int(objective.correct) if isinstance(objective, Classifier) else 0
        sums += torch.tensor([value, correct, batch.predicted], dtype=torch.float64)
    objective.train(training)
    losses, correct, count = total(sums).tolist()
    return Validation(losses / count, correct / count if isinstance(objective, Classifier) else None)


def check_on_host(config: TrainConfig, on_host: str | None) -> None:
    """Raises OptionError where weights cannot stay on the host."""
    if on_host is not None and config.is_preset:
        text = f"{on_host!r} given with --model {config.model}; allowed with models of transformers"
        raise OptionError("weights_on_host", text)
    if on_host == "layers" and config.techniques.loss_chunk is not None:
        raise OptionError(
            "loss_chunk", "given with --weights-on-host layers; allowed: without, or with model"
        )


def evaluate(config: TrainConfig, source: Source, on_host: str | None = None) -> Validation:
    """The validation loss of a model that is not trained.

    on_host: "layers", each layer's weights are on the device while it runs (accelerate.cpu_offload); "model", all of
    them while the model runs (accelerate.cpu_offload_with_hook), and on the host again afterwards.
    """
    check_on_host(config, on_host)
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

    def loss(*batch: Tensor | None) -> Tensor:
        on_device = (tensor if tensor is None else tensor.to(device) for tensor in batch)
        with autocast(config.techniques, device.type):
            return objective(*on_device)

    found = validate(objective, source.corpus.validation_batches(config), loss)
    if hook is not None:
        hook.offload()
    return found
