"""transformers' Trainer with memkern's optimizers (optimizer_cls_and_kwargs) and CompressCallback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.integrations.models import TRAINER, Texts, compiled_gpt2, gpt2, parameters_of
from tests.support.helpers import assert_same, first_full, first_quick

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from memkern.integrations.transformers import CompressCallback, optimizer_cls_and_kwargs  # noqa: E402


def arguments(folder: Path, **options: Any) -> Any:
    defaults = {"output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 4}
    return transformers.TrainingArguments(**TRAINER | defaults | options)


def trainer(args: Any, model: Any, pair: Any = None, **options: Any) -> Any:
    if pair is not None:
        options["optimizer_cls_and_kwargs"] = pair
    return transformers.Trainer(model, args, train_dataset=Texts(), **options)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


NAMES = ["adamw8bit", "adam8bit", "lion8bit", "lamb8bit", "lars8bit", "adamw"]


@pytest.mark.feature("transformers", "Trainer, `optimizer_cls_and_kwargs`: every optimizer")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "adamw8bit" else pytest.mark.full) for n in NAMES])
def test_the_trainer_makes_the_optimizer_made_by_hand(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    by_pair = trainer(args, gpt2(), optimizer_cls_and_kwargs(args, name))
    by_pair.train()
    cls = type(by_pair.optimizer.optimizer)
    assert cls.__name__.lower() == name

    model = gpt2()
    decayed = by_pair.get_decay_parameter_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    by_hand = trainer(args, model, optimizers=(cls(groups, lr=1e-3), None))
    by_hand.train()
    assert_same(parameters_of(by_pair.model), parameters_of(by_hand.model))
    assert losses(by_pair) == losses(by_hand)


@pytest.mark.feature("transformers", "Trainer with Muon for matrices and AdamW for the rest")
def test_muon_takes_the_groups_of_the_model(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), gpt2()
    with pytest.raises(ValueError, match="model must be given with optimizer='muon8bit'"):
        optimizer_cls_and_kwargs(args, "muon8bit")
    by_pair = trainer(args, model, optimizer_cls_and_kwargs(args, "muon8bit", model=model, adamw_lr=3e-4))
    by_pair.train()
    groups = by_pair.optimizer.param_groups
    assert [group["algorithm"] for group in groups if group["initial_lr"] == 1e-3] == ["muon"]
    assert {group["algorithm"] for group in groups if group["initial_lr"] == 3e-4} == {"adamw"}
    model_by_hand = gpt2()
    by_hand = memkern.optim.Muon8bit(memkern.optim.muon_groups(model_by_hand, lr=1e-3, adamw_lr=3e-4))
    expected = trainer(args, model_by_hand, optimizers=(by_hand, None))
    expected.train()
    assert_same(parameters_of(by_pair.model), parameters_of(expected.model))


def test_the_trainers_arguments_become_options(tmp_path: Path) -> None:
    args = arguments(tmp_path, adam_beta2=0.95, adam_epsilon=1e-6)
    cls, options = optimizer_cls_and_kwargs(args, "adamw8bit", block_size=64)
    assert cls is optim.AdamW8bit
    assert options == {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "block_size": 64}
    assert optimizer_cls_and_kwargs(args, "lion8bit")[1] == {"lr": 1e-3, "betas": (0.9, 0.95)}
    plain = arguments(tmp_path)
    assert "betas" not in optimizer_cls_and_kwargs(plain, "lion8bit")[1]  # Adam's are not its own
    assert optimizer_cls_and_kwargs(plain, "lars8bit")[1] == {"lr": 1e-3}
    assert optimizer_cls_and_kwargs(plain, "adamw", lr=5.0)[1]["lr"] == 5.0


@pytest.mark.full
def test_with_a_model_marked_embeddings_keep_32_bits(tmp_path: Path) -> None:
    model = gpt2()
    memkern.compress(model, activations=None, embeddings=True)
    args = arguments(tmp_path, max_steps=1)
    run = trainer(args, model, optimizer_cls_and_kwargs(args, model=model))
    run.train()
    state = run.optimizer.optimizer.state
    assert state[model.transformer.wte.weight]["exp_avg"].dtype == torch.float32
    assert state[model.transformer.h[0].mlp.c_fc.weight]["exp_avg"].dtype == torch.int8


def test_bad_names_and_options_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"optimizer must be one of adam, adam8bit, .*, got 'adamw_8bit'"):
        optimizer_cls_and_kwargs(args, "adamw_8bit")
    with pytest.raises(TypeError, match="write state_bits=8"):
        optimizer_cls_and_kwargs(args, "adamw", optim_bits=8)
    with pytest.raises(ValueError, match="block_size must be a multiple of 8"):
        optimizer_cls_and_kwargs(args, "adamw", block_size=3)
    for options in ({"layers": 3}, {"stochastic_rounding": True}):  # of models whose parameters have three layers, bf16
        assert optimizer_cls_and_kwargs(args, "lamb8bit", **options)[1].items() >= options.items()


@pytest.mark.feature("transformers", "Trainer: resumes from a checkpoint bit for bit")
@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("model", first_full([gpt2, compiled_gpt2]))
def test_a_checkpoint_resumes_bit_for_bit(
    tmp_path: Path, model: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=3, lr_scheduler_type="cosine")
    straight = trainer(args, model(), optimizer_cls_and_kwargs(args))
    straight.train()
    callback = CompressCallback(activations=None)
    resumed = trainer(args, model(seed=1), optimizer_cls_and_kwargs(args), callbacks=[callback])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert capsys.readouterr().out.count("memkern: states of AdamW8bit take") == 1
    assert_same(parameters_of(resumed.model), parameters_of(straight.model))
    states = (list(t.optimizer.optimizer.state.values()) for t in (resumed, straight))
    for ours, theirs in zip(*states, strict=True):
        assert_same(ours, theirs)


@pytest.mark.full
@pytest.mark.feature("transformers", "Trainer callback: compresses and prints what is saved")
def test_the_callback_compresses_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, max_steps=2)
    callback = CompressCallback()
    run = trainer(args, gpt2(), optimizer_cls_and_kwargs(args), callbacks=[callback])
    assert isinstance(run.model.transformer.h[0].mlp.act, memkern.nn.GELU)
    assert len(callback.report.swapped) == 2
    run.train()
    printed = capsys.readouterr().out
    assert printed.count("memkern.compress: 2 modules swapped") == 1
    states = memkern.memory.optimizer_bytes(run.optimizer.optimizer)
    fp32 = 8 * sum(p.numel() for p in run.model.parameters())
    assert printed.count(f"memkern: states of AdamW8bit take {states:,} bytes, {fp32:,} in fp32") == 1
    assert str(callback.report) in printed
    assert memkern.restore(run.model) == 2


@pytest.mark.full
def test_the_callback_follows_model_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, max_steps=1)
    callback = CompressCallback()
    run = transformers.Trainer(None, args, train_dataset=Texts(), model_init=lambda: gpt2(), callbacks=[callback])
    run.train()
    assert isinstance(run.model.transformer.h[0].mlp.act, memkern.nn.GELU)
    assert "memkern: states" not in capsys.readouterr().out  # torch's optimizer


@pytest.mark.feature("transformers", "Trainer with bf16 autocast, gradient checkpointing and accumulation")
@pytest.mark.full
def test_autocast_checkpointing_and_accumulation(tmp_path: Path) -> None:
    options = {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "max_steps": 8}
    args = arguments(tmp_path, **options)
    run = trainer(args, gpt2(), optimizer_cls_and_kwargs(args), callbacks=[CompressCallback()])
    run.train()
    plain = trainer(arguments(tmp_path, optim="adamw_torch", **options), gpt2())
    plain.train()
    for ours, theirs in zip(losses(run), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)  # bf16's own rounding is 0.4 %


@pytest.mark.parametrize("callback", [True, False])
@pytest.mark.parametrize("mode", first_quick(["StepInBackward", "offload_gradients"]))
def test_gradients_that_are_gone_are_not_silently_unclipped(mode: str, callback: bool, tmp_path: Path) -> None:
    """The Trainer clips to 1.0 by default, and would find no gradients left to clip."""

    def trainer_of(inner_norm: float | None = None, **options: Any) -> Any:
        model = gpt2()
        clip = {} if inner_norm is None else {"max_grad_norm": inner_norm}
        if mode == "StepInBackward":
            optimizer: Any = optim.StepInBackward(optim.AdamW8bit, model.parameters(), lr=1e-3)
        else:
            optimizer = optim.HostOffload(optim.AdamW8bit, model.parameters(), lr=1e-3, **{mode: True}, **clip)
        args = arguments(tmp_path, max_steps=1, **options)
        callbacks = [CompressCallback()] if callback else []
        return trainer(args, model, optimizers=(optimizer, None), callbacks=callbacks)

    before = parameters_of(gpt2())
    refused = trainer_of()
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 given with (StepInBackward|HostOffload)"):
        refused.train()
    if callback or mode == "offload_gradients":
        assert_same(parameters_of(refused.model), before)
    allowed = trainer_of(1.0 if mode == "offload_gradients" else None, max_grad_norm=0.0)
    allowed.train()
    assert any((a != b).any() for a, b in zip(parameters_of(allowed.model), before, strict=True))
