"""accelerate and the Trainer with FSDP2, which swap the parameters of an optimizer that exists already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memkern import optim
from tests.integrations.models import TRAINER, Texts, gpt2, tokens
from tests.support.helpers import assert_same, first_full
from tests.support.ranks import Ranks

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full

# name: the optimizer's class and options
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW8bit": ("AdamW8bit", {}),
    "LAMB8bit": ("LAMB8bit", {}),
    "clipped": ("AdamW8bit", {"max_grad_norm": 0.1}),
    "Lion8bit": ("Lion8bit", {}),
}


def _set_up_process() -> None:
    """Sets torchrun's variables, and lets accelerate, which allows FSDP2 on GPUs alone, use it on the CPU with gloo."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", OMP_NUM_THREADS="1")
    init = AcceleratorState.__init__
    if init.__name__ == "with_fsdp":
        return

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        plugin = fsdp_plugin or self._shared_state.get("fsdp_plugin")
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if plugin is not None:  # each further AcceleratorState() sets it back
            self.distributed_type, self.fsdp_plugin = accelerate.utils.DistributedType.FSDP, plugin

    AcceleratorState.__init__ = with_fsdp


def _full_parameters(model: torch.nn.Module) -> list[Tensor]:
    """All of each parameter, of which a process has a shard."""
    parameters = [p.detach() for p in model.parameters()]
    assert all(isinstance(p, DTensor) for p in parameters)
    return [p.full_tensor() for p in parameters if isinstance(p, DTensor)]


def _prepared(name: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    _set_up_process()
    plugin = accelerate.utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    cls, options = OPTIONS[name]
    model = gpt2(seed)
    optimizer = getattr(optim, cls)(model.parameters(), lr=1e-3, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def _train(model: Any, optimizer: Any, scheduler: Any, first: int, last: int, backward: Any = Tensor.backward) -> None:
    for seed in range(first, last):
        rows = tokens(4, seed)
        backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        for _ in range(2 if backward is Tensor.backward else 1):  # accelerate's has a step for each rank
            scheduler.step()
        optimizer.zero_grad()


def in_accelerate(name: str) -> list[Tensor]:
    accelerator, *parts = _prepared(name)
    _train(*parts, 0, 4, accelerator.backward)
    return _full_parameters(parts[0])


def resumed(name: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after four steps, straight and resumed after two."""
    accelerator, *parts = _prepared(name)
    _train(*parts, 0, 2, accelerator.backward)
    accelerator.save_state(folder)
    _train(*parts, 2, 4, accelerator.backward)
    straight = _full_parameters(parts[0])
    accelerator, *parts = _prepared(name, seed=1)
    accelerator.load_state(folder)
    _train(*parts, 2, 4, accelerator.backward)
    return straight, _full_parameters(parts[0])


@pytest.mark.feature("accelerate", "FSDP2: an optimizer made before `prepare` trains as in one process")
@pytest.mark.parametrize("name", first_full(OPTIONS, 3))
def test_an_optimizer_made_before_prepare_steps_as_in_one_process(ranks: Ranks, name: str) -> None:
    actual, on_rank_1 = ranks(2, in_accelerate, name)
    assert_same(actual, on_rank_1)
    cls, options = OPTIONS[name]
    model = gpt2()
    optimizer = getattr(optim, cls)(model.parameters(), lr=1e-3, **options)
    _train(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10), 0, 4)
    expected = [p.detach() for p in model.parameters()]
    if name in ("LAMB8bit", "clipped"):  # norms are summed in another order over two ranks
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
    else:
        assert_same(actual, expected)


@pytest.mark.feature("accelerate", "FSDP2: `save_state`, `load_state`: resumes bit for bit")
@pytest.mark.parametrize("name", first_full(["AdamW8bit", "LAMB8bit", "Lion8bit"], 2))
def test_a_saved_state_resumes_bit_for_bit(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for straight, continued in ranks(2, resumed, name, str(tmp_path)):
        assert_same(continued, straight)


def in_trainer(name: str, folder: str, checkpoint: str | None, seed: int) -> tuple[list[Tensor], list[float]]:
    _set_up_process()
    cls, options = OPTIONS[name]
    run_options = {"max_steps": 4, "weight_decay": 0.0, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    fsdp = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "version": 2}
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, ddp_backend="gloo", fsdp=True, fsdp_config=fsdp,
        **TRAINER | run_options,
    )  # fmt: skip
    options = {"lr": 1e-3, **options}
    trainer = transformers.Trainer(
        gpt2(seed), arguments, train_dataset=Texts(), optimizer_cls_and_kwargs=(getattr(optim, cls), options)
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return _full_parameters(trainer.model), [x["loss"] for x in trainer.state.log_history if "loss" in x]


@pytest.mark.feature("transformers", "Trainer with FSDP2: trains, and resumes bit for bit")
@pytest.mark.parametrize("name", first_full(["clipped", "AdamW8bit"]))
def test_the_trainer_resumes_bit_for_bit(ranks: Ranks, name: str, tmp_path: Path) -> None:
    (straight, losses), _ = ranks(2, in_trainer, name, str(tmp_path), None, 0)
    assert len(losses) == 4
    (continued, _), _ = ranks(2, in_trainer, name, str(tmp_path), str(tmp_path / "checkpoint-2"), 1)
    assert_same(continued, straight)
