"""Lightning's Trainer with memkern: the bits of a plain loop, clipping, checkpoints, mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.integrations.models import Texts, compiled_gpt2, gpt2, parameters_of
from tests.support.helpers import assert_same, first_full

lightning = pytest.importorskip("lightning.pytorch")

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice about workers and loggers
]


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, seed: int = 0, make: Callable[..., Any] = gpt2) -> None:
        super().__init__()
        self.model, self.losses = make(seed), []

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=input_ids)

    def training_step(self, batch: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        loss = self(batch["input_ids"]).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        groups = optim.param_groups(self, weight_decay=0.1)
        optimizer = optim.AdamW8bit(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(module: Module, folder: Path, steps: int, resume: str | None = None, rows: int = 32, **options: Any) -> Any:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, default_root_dir=folder, **off, **options)
    trainer.fit(module, torch.utils.data.DataLoader(Texts(rows), batch_size=4), ckpt_path=resume)
    return trainer


@pytest.mark.feature("lightning", "`configure_optimizers`: bits of the plain loop, with a schedule and clipping")
def test_fit_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    module = Module()
    fit(module, tmp_path, 4, gradient_clip_val=1.0)
    plain = Module()
    configured = plain.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    rows = Texts().rows
    for i in range(4):
        plain.training_step({"input_ids": rows[4 * i : 4 * i + 4]}, i).backward()
        # In Lightning's order: the norm's last bit depends on it (torch 2.10).
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert module.losses == plain.losses
    assert_same(parameters_of(module), parameters_of(plain))


@pytest.mark.parametrize("mode", ["StepInBackward", "offload_gradients"])
def test_gradients_that_are_gone_are_not_silently_unclipped(mode: str, tmp_path: Path) -> None:
    class Freed(Module):
        def configure_optimizers(self) -> Any:
            if mode == "StepInBackward":
                return optim.StepInBackward(optim.AdamW8bit, self.parameters())
            return optim.HostOffload(optim.AdamW8bit, self.parameters(), **{mode: True})

    with pytest.raises(ValueError, match=r"gradient_clip_val=1\.0 given with (StepInBackward|HostOffload)"):
        fit(Freed(), tmp_path, 1, gradient_clip_val=1.0)
    fit(Freed(), tmp_path, 1)


@pytest.mark.feature("lightning", "checkpoint: resumes bit for bit")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("make", first_full([gpt2, compiled_gpt2]))
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, make: Callable[..., Any]) -> None:
    straight = Module(make=make)
    fit(straight, tmp_path, -1, rows=12, max_epochs=2)  # of three steps: Lightning resumes data at an epoch's end
    first = Module(make=make)
    trainer = fit(first, tmp_path, -1, rows=12, max_epochs=1)
    path = str(tmp_path / "step-3.ckpt")
    trainer.save_checkpoint(path)
    resumed = Module(1, make)
    fit(resumed, tmp_path, -1, resume=path, rows=12, max_epochs=2)
    assert straight.losses[:3] == first.losses
    assert straight.losses[3:] == resumed.losses
    assert_same(parameters_of(resumed), parameters_of(straight))


@pytest.mark.feature("lightning", '`precision="bf16-mixed"` and accumulation')
def test_losses_under_autocast_with_accumulation_are_near_fp32s(tmp_path: Path) -> None:
    module = Module()
    memkern.compress(module)
    fit(module, tmp_path, 4, precision="bf16-mixed", accumulate_grad_batches=2)
    assert len(module.losses) == 8
    assert all(p.isfinite().all() for p in module.parameters())
    exact = Module()
    fit(exact, tmp_path, 4, accumulate_grad_batches=2)
    assert module.losses == pytest.approx(exact.losses, rel=0.02)  # bf16's own rounding is 0.4 %


@pytest.mark.feature("lightning", "`gradient_clip_val` with `bf16-mixed` and `16-mixed`")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_are_clipped_in_mixed_precision(tmp_path: Path, precision: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if precision == "16-mixed" else None
    norms: list[float] = []

    class Watched(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            norms.append(float(total))

        def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
            super().configure_gradient_clipping(*args, **options)
            Watched.on_before_optimizer_step(self, None)

    module = Watched()
    fit(module, tmp_path, 2, plugins=[MixedPrecision(precision, "cpu", scaler)], gradient_clip_val=0.125)
    assert norms
    assert min(norms) == pytest.approx(0.125, rel=1e-3)  # unscaled, then clipped
    assert len(module.losses) == 2
