"""The recipe on models of transformers: tiny ones, with random weights."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError, memory
from memkern.train import TrainConfig, Trainer, run
from memkern.train import checkpoint as checkpoints
from memkern.train.build import Source, load
from memkern.train.data import IGNORED
from memkern.train.evaluation import evaluate
from tests.support.train_helpers import assert_same_run, weights

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small GPT-2, without weights and tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2Config(
        n_layer=5,
        n_head=2,
        n_embd=32,
        n_positions=64,
        vocab_size=300,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small(gpt2: str, text: Path) -> TrainConfig:
    return TrainConfig(
        data=(str(text),), model=gpt2, from_config=True, bytes=True, seq_len=32, steps=6, warmup=1, eval_every=3,
        eval_tokens=256, lr=2e-3, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(small: TrainConfig) -> Source:
    return load(small)


def trained(config: TrainConfig, source: Source, **changes: Any) -> Trainer:
    trainer = Trainer(config.replace(**changes), source)
    run([trainer])
    return trainer


# Language models


def test_a_model_of_transformers_learns(small: TrainConfig, source: Source) -> None:
    trainer = trained(small, source, steps=60, eval_every=60)
    assert type(trainer.model).__name__ == "GPT2LMHeadModel"
    assert trainer.history.train_loss[0] == pytest.approx(math.log(300), abs=0.1)
    assert trainer.result().validation_loss < 3.4
    assert trainer.result().unit == "token"


def test_an_epoch_has_every_token_once_and_a_last_group_that_is_smaller(small: TrainConfig, source: Source) -> None:
    config = small.replace(micro_batch=3, accumulation=5, epochs=2)
    corpus = source.corpus
    per_epoch = corpus.steps_per_epoch(config)
    tokens = len(corpus.train) - 1
    assert tokens % 32  # so that the last window is shorter
    assert per_epoch == math.ceil(math.ceil(tokens / 32) / 15)
    for epoch in (0, 1):
        steps = [corpus.step(config, epoch * per_epoch + i) for i in range(per_epoch)]
        windows = {tuple(row) for step in steps for batch in step for row in batch.inputs.tolist()}
        assert sum(batch.predicted for step in steps for batch in step) == tokens
        assert len(windows) > 0.99 * math.ceil(tokens / 32)
        assert all(len(step) == 5 for step in steps[:-1])
        assert sum(len(batch.inputs) for batch in steps[-1]) == math.ceil(tokens / 32) % 15
    first = [corpus.step(config, step)[0].inputs for step in (0, per_epoch)]
    assert not torch.equal(*first)
    assert Trainer(config, source).config.steps == 2 * per_epoch


@pytest.mark.parametrize("shape", [(1, 8), (4, 2), (3, 3)])
def test_accumulation_weighs_tokens_alike(small: TrainConfig, source: Source, shape: tuple[int, int]) -> None:
    """Every token has the weight it has in one batch, where a window is short and where an epoch ends."""
    group = shape[0] * shape[1]
    corpus = dataclasses.replace(source.corpus, train=source.corpus.train[: 32 * 29 + 10])  # 30 windows
    whole = small.replace(micro_batch=group, accumulation=1, optimizer="torch-adamw", state_bits=32, clip=0)
    parts = whole.replace(micro_batch=shape[0], accumulation=shape[1])
    per_epoch = corpus.steps_per_epoch(whole)
    counts = [[batch.predicted for batch in corpus.step(parts, step)] for step in range(per_epoch)]
    short = next(step for step in range(per_epoch) if sum(counts[step]) % 32)
    assert sum(counts[-1]) < (group - 1) * 32
    for step in {short, per_epoch - 1}:
        gradients = []
        for config in (whole, parts):
            trainer = Trainer(config, dataclasses.replace(source, corpus=corpus))
            trainer.steps_done = step
            batches, count = trainer._next_batches()
            assert count == sum(counts[step])
            loss = trainer._backward(batches, count, counted=False)
            gradients.append([loss, *(parameter.grad for parameter in trainer.model.parameters())])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("every", "limit"), [(1, 0.5), (2, 0.75)])
def test_checkpointing_changes_bytes_and_no_bit(small: TrainConfig, source: Source, every: int, limit: float) -> None:
    options = {"micro_batch": 8, "dropout": 0.1}
    checkpoints = {"checkpointing": "blocks", "checkpoint_every": every}
    kept, again = (trained(small, source, **each, **options) for each in ({}, checkpoints))
    assert_same_run(kept, again)
    assert again.result().saved_bytes < limit * kept.result().saved_bytes
    assert again.result().peak_bytes < kept.result().peak_bytes


def test_half_precision_is_built_without_an_fp32_copy(small: TrainConfig, source: Source) -> None:
    from memkern.train import huggingface

    config = small.replace(precision="bf16")
    models: list[torch.nn.Module] = []
    peak = memory.peak_bytes(lambda: models.append(huggingface.build(config, source.hf_config)))
    [model] = models
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    parameters = memory.tensor_bytes(model.parameters())
    head = 300 * 32 * 2  # allocated before it is tied to the embedding
    assert peak < 1.05 * parameters + head + 64 * 64  # masks


def test_a_run_resumes_bit_for_bit_with_dropout(small: TrainConfig, source: Source, tmp_path: Path) -> None:
    config = small.replace(dropout=0.1, accumulation=2)
    straight = Trainer(config, source)

    def on_step(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            checkpoints.save(tmp_path / "run.pt", trainer.state_dict())

    run([straight], on_step)
    resumed = Trainer(config, source)
    resumed.load_state_dict(checkpoints.load(tmp_path / "run.pt"))
    run([resumed])
    assert_same_run(straight, resumed)


def test_a_checkpoint_of_another_model_is_refused(small: TrainConfig, source: Source, tmp_path: Path) -> None:
    state = Trainer(small, source).state_dict()
    source.hf_config.save_pretrained(tmp_path)
    other = small.replace(model=str(tmp_path))
    with pytest.raises(OptionError, match=f"model: {tmp_path} given; allowed: {small.model}"):
        Trainer(other, source).load_state_dict(state)
    bigger = dataclasses.replace(
        source, hf_config=transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=300)
    )
    trainer = Trainer(small, bigger)
    before = [weight.clone() for weight in weights(trainer)]
    with pytest.raises(OptionError, match="resume: given a checkpoint of another model"):
        trainer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


@pytest.mark.full
def test_workers_change_no_bit(small: TrainConfig, source: Source) -> None:
    assert_same_run(trained(small, source), trained(small, source, workers=2))


@pytest.mark.parametrize("on_host", ["layers", "model"])
def test_weights_wait_on_the_host(
    small: TrainConfig, source: Source, monkeypatch: pytest.MonkeyPatch, on_host: str
) -> None:
    accelerate = pytest.importorskip("accelerate")
    name = {"layers": "cpu_offload", "model": "cpu_offload_with_hook"}[on_host]
    models = []
    original = getattr(accelerate, name)

    def noted(model: torch.nn.Module, *args: Any) -> Any:
        models.append(model)
        return original(model, *args)

    monkeypatch.setattr(accelerate, name, noted)
    assert evaluate(small, source, on_host) == evaluate(small, source)
    [model] = models
    devices = {parameter.device.type for parameter in model.parameters()}
    assert devices == {"meta" if on_host == "layers" else "cpu"}  # accelerate has the weights in a dict of its own


# Tokens


def test_a_tokenizer_is_trained_on_the_text(small: TrainConfig, text: Path, tmp_path: Path) -> None:
    config = small.replace(bytes=False)
    source = load(config)
    assert 258 < source.tokenizer.size <= 300
    assert source.corpus.train.max() < source.tokenizer.size
    content = text.read_text()
    cut = len(content) - len(content) // 10
    assert source.tokenizer.tokenizer.decode(source.corpus.train[:-1].tolist()) == content[:cut]
    assert source.corpus.train[-1] == source.tokenizer.eos
    assert torch.equal(source.corpus.train, load(config).corpus.train)


def test_what_is_exported_is_loaded_and_has_the_same_loss(small: TrainConfig, tmp_path: Path) -> None:
    from memkern.train import huggingface

    config = small.replace(bytes=False, activation_bits=3, checkpointing="blocks", checkpoint_every=2)
    source = load(config)
    trainer = trained(config, source)
    huggingface.export(trainer.model, trainer.weights(), source.tokenizer, tmp_path / "model")
    again = small.replace(bytes=False, from_config=False, model=str(tmp_path / "model"))
    loaded = load(again)
    assert loaded.corpus.digest == source.corpus.digest  # the folder's tokenizer
    fine_tuned = Trainer(again, loaded)
    assert fine_tuned.evaluate() == pytest.approx(trainer.result().validation_loss, rel=1e-5)
    assert again.replace(lr=None).peak_lr == pytest.approx(5e-5)


def test_long_texts_are_cut_before_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from memkern.train import tokenizers

    monkeypatch.setattr(tokenizers, "BATCH_CHARACTERS", 20)
    texts = ["one line\ntwo lines\nthree lines\nfour", "x" * 50, "", "short"]
    found = tokenizers.stream(tokenizers.Bytes(), texts)
    assert bytes(i for i in found.tolist() if i < 256).decode() == "".join(texts)
    assert [piece for index, piece in tokenizers.pieces(texts) if index == 0] == [
        "one line\ntwo lines", "\nthree lines\nfour",
    ]  # fmt: skip
    ends = [i for i, token in enumerate(found.tolist()) if token == 256]
    assert ends == [35, 86, 87, 93]


def test_ignored_targets_have_no_loss_and_no_gradient(small: TrainConfig, source: Source) -> None:
    trainer = Trainer(small, source)
    [batch] = source.corpus.step(small, 0)
    loss = trainer.loss(batch.inputs, torch.full_like(batch.targets, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in trainer.model.parameters() if parameter.grad is not None)
