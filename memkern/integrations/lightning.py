"""For Lightning: a callback that compresses the module; ``configure_optimizers`` takes the optimizers as they are.

::

    from memkern.integrations.lightning import CompressCallback

    trainer = lightning.Trainer(callbacks=[CompressCallback()])

Needs ``pip install lightning`` (or ``pytorch-lightning``).
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from .summary import Compressing


class CompressCallback(Callback):
    """Compresses the module before its strategy wraps it, and prints what that saves.

    Args:
        options: those of :func:`memkern.compress`.

    ``report`` is compress' report. After the first step the table of the optimizer states' bytes is printed too. Only
    the first process prints. ``memkern.restore(module)`` undoes it. A module that makes its layers in
    ``configure_model`` calls ``memkern.compress`` there: this callback comes before.
    """

    def __init__(self, **options: Any) -> None:
        self._compressing = Compressing(options)

    @property
    def report(self) -> Any:
        return self._compressing.report

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._compressing.compress(pl_module, trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        for optimizer in trainer.optimizers:
            self._compressing.after_step(optimizer, trainer.is_global_zero)
