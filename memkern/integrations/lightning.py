"""For Lightning: a callback that compresses the module; ``configure_optimizers`` takes the optimizers as they are.

::

    from memkern.integrations.lightning import CompressCallback

    trainer = lightning.Trainer(callbacks=[CompressCallback(example=batch)])

Needs ``pip install lightning`` (or ``pytorch-lightning``).
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from ..saved import hooks
from .summary import Compressing

_STEP = "training_step"


class CompressCallback(Callback):
    """Compresses the module before its strategy wraps it, and prints what that saves.

    Args:
        options: those of :func:`memkern.compress`. With ``example``, a batch as the module's ``forward`` takes it, it
            measures.

    Lightning calls the module's ``training_step``, and not the module, whose forward hooks would open the context of
    ``saved_bits``. While the fit runs, the step opens it too, around all that it does. Modules that ``saved_bits``
    names open it themselves when they are called, as everywhere.

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
            if hooks.is_installed(pl_module) and not isinstance(getattr(pl_module, _STEP), hooks.SavingStep):
                vars(pl_module)[_STEP] = hooks.SavingStep(pl_module, getattr(pl_module, _STEP))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        step = vars(pl_module).get(_STEP)
        if isinstance(step, hooks.SavingStep):
            del vars(pl_module)[_STEP]
            if getattr(pl_module, _STEP) != step.__wrapped__:  # the instance had one, as torch.compile sets it
                vars(pl_module)[_STEP] = step.__wrapped__

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        for optimizer in trainer.optimizers:
            self._compressing.after_step(optimizer, trainer.is_global_zero)
