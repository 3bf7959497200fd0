"""memkern.trainer_arguments: the techniques that a plan recommends, in transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern import OptionError, Techniques, memory, optim
from memkern.compiled.blocks import is_compiled
from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import Predictor
from tests.integrations.models import TRAINER, Texts, gpt2, parameters_of
from tests.support.helpers import assert_same, first_quick

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from memkern.integrations.transformers import optimizer_cls_and_kwargs  # noqa: E402


def trainer(model: Any, techniques: Techniques, folder: Path, rows: Any = None, **options: Any) -> Any:
    arguments = memkern.trainer_arguments(
        model, techniques, output_dir=str(folder), **TRAINER | {"max_steps": 3} | options
    )
    return transformers.Trainer(**arguments, train_dataset=rows or Texts())


PLANNED = [
    Techniques(state_bits=8, micro_batch=2, checkpointing="blocks", accumulation=2),
    Techniques(
        precision="bf16", master_weights="bf16+8", state_bits=8, micro_batch=4, step_in_backward=True,
        checkpointing="blocks",
    ),
]  # fmt: skip


@pytest.mark.parametrize("techniques", first_quick(PLANNED), ids=str)
def test_the_peak_is_the_plans(tmp_path: Path, techniques: Techniques) -> None:
    """The tensors of a run have the predicted peak, without the process's own bytes, within 3 %."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 6, "n_head": 4, "n_embd": 128, "n_positions": 128, "vocab_size": 1000}
    config = transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    config.architectures = ["GPT2LMHeadModel"]
    model = transformers.GPT2LMHeadModel(config)
    clip = 0.0 if techniques.step_in_backward else 1.0
    rows = Texts(64, vocabulary=1000, length=128)
    run = trainer(model, techniques, tmp_path, rows, max_steps=2, clip=clip)
    peak = memory.peak_bytes(run.train, model)
    source = resolve(config, 128, None, None, None)
    plan = Predictor(source, "cpu", "cpu", DEFAULTS["cpu"]).predict(techniques)
    assert peak == pytest.approx(plan.peak - plan.categories["process and context"], rel=0.03)


def test_the_optimizer_is_the_one_made_by_hand(tmp_path: Path) -> None:
    run = trainer(gpt2(), Techniques(state_bits=8, micro_batch=4), tmp_path, adam_beta2=0.95, adam_epsilon=1e-6)
    run.train()
    assert {group["state_bits"] for group in run.optimizer.param_groups} == {8}
    args, model = run.args, gpt2()
    pair = optimizer_cls_and_kwargs(args, "adamw", model=model, state_bits=8)
    assert pair[1]["betas"] == (0.9, 0.95)
    expected = transformers.Trainer(model, args, train_dataset=Texts(), optimizer_cls_and_kwargs=pair)
    expected.train()
    assert_same(parameters_of(run.model), parameters_of(expected.model))


@pytest.mark.full
def test_blocks_are_compiled_in_place(tmp_path: Path) -> None:
    run = trainer(gpt2(), Techniques(state_bits=8, micro_batch=4, compile=True, saved_bits=8), tmp_path)
    assert all(map(is_compiled, run.model.transformer.h))
    run.train()
    assert len([entry for entry in run.state.log_history if "loss" in entry]) == 3


@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_gradients_on_the_host_are_clipped_in_the_step(tmp_path: Path, clip: float) -> None:
    on_device, on_host = (
        trainer(gpt2(), Techniques(state_bits=8, micro_batch=4, offload=offload), tmp_path, clip=clip)
        for offload in (None, "cpu")
    )
    for run in (on_device, on_host):
        run.train()
    assert isinstance(on_host.optimizer.optimizer, optim.HostOffload)
    assert on_host.args.max_grad_norm == 0
    for a, b in zip(parameters_of(on_device.model), parameters_of(on_host.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("techniques", "options", "message"),
    [
        ({"loss_chunk": 64}, {}, r"loss_chunk: 64 given; allowed: None with transformers' Trainer"),
        ({"weights_on_host": "layers"}, {}, "weights_on_host: 'layers' given; allowed: None with transformers'"),
        ({"step_in_backward": True}, {}, r"clip: 1\.0 given; allowed: 0 with step_in_backward"),
        ({}, {"bf16": True}, "trainer_arguments.. got bf16, which the techniques and clip say"),
        ({"checkpointing": "blocks"}, {"per_device_train_batch_size": 2}, "per_device_train_batch_size"),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(
    tmp_path: Path, techniques: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    model = gpt2()
    classes = [type(module) for module in model.modules()]
    with pytest.raises((OptionError, TypeError), match=message):
        trainer(model, Techniques(precision="bf16", activation_bits=3, **techniques), tmp_path, **options)
    assert [type(module) for module in model.modules()] == classes
    assert {p.dtype for p in model.parameters()} == {torch.float32}
