"""The recipe on models of transformers: tiny ones, with random weights."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError, memory
from memkern.train import Source, TrainConfig, Trainer, load, run
from memkern.train import checkpoint as checkpoints
from memkern.train.huggingface import Pretrained
from tests.support.train_helpers import assert_same_run, step_peak, tiny_tokenizer, weights

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
    assert trainer.result().unit == "byte"


@pytest.mark.parametrize(("every", "limit"), [(1, 0.5), (2, 0.75)])
def test_checkpointing_changes_bytes_and_no_bit(small: TrainConfig, source: Source, every: int, limit: float) -> None:
    options = {"micro_batch": 8, "dropout": 0.1}
    checkpoints = {"checkpointing": "blocks", "checkpoint_every": every}
    kept, again = (trained(small, source, **each, **options) for each in ({}, checkpoints))
    assert_same_run(kept, again)
    assert again.result().saved_bytes < limit * kept.result().saved_bytes
    assert step_peak(again) < step_peak(kept)


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


# Tokens


def test_tokens_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is cut before lines; the end token is after each document, and nowhere else."""
    monkeypatch.setattr("memkern.train.huggingface.CHARACTERS", 20)
    tokenizer = tiny_tokenizer()
    texts = ["one line\ntwo lines\nthree lines\nfour", "x" * 50, "short"]
    ids = Pretrained(tokenizer).ids(texts)
    assert ids.dtype == torch.int32
    end = tokenizer.eos_token_id
    ends = [i for i, token in enumerate(ids.tolist()) if token == end]
    assert len(ends) == 3
    assert tokenizer.decode(ids[ids != end]) == "".join(texts)


def test_what_is_exported_is_loaded_and_has_the_same_loss(small: TrainConfig, tmp_path: Path) -> None:
    from memkern.train import huggingface

    source = load(small)
    source.hf_config.save_pretrained(tmp_path / "tokens")
    tiny_tokenizer().save_pretrained(tmp_path / "tokens")
    config = small.replace(bytes=False, model=str(tmp_path / "tokens"), activation_bits=3, checkpointing="blocks")
    source = load(config)
    assert source.corpus.unit == "token"
    trainer = trained(config, source)
    (tmp_path / "model").mkdir()
    huggingface.export(trainer.model, trainer.weights(), source.tokenizer, tmp_path / "model")
    again = small.replace(bytes=False, from_config=False, model=str(tmp_path / "model"))
    loaded = load(again)
    assert loaded.corpus.digest == source.corpus.digest  # the folder's tokenizer
    fine_tuned = Trainer(again, loaded)
    assert fine_tuned.evaluate() == pytest.approx(trainer.result().validation_loss, rel=1e-5)
    assert again.replace(lr=None).peak_lr == pytest.approx(5e-5)
