"""memkern.train on models of transformers, tiny ones with random weights: loss in chunks, resuming, --export."""

import math
from pathlib import Path

import pytest
import torch

from memkern import OptionError, memory
from memkern.__main__ import main
from memkern.train import Corpus, TrainConfig, Trainer, huggingface, load
from tests.support.train_helpers import BF16_WEIGHTS, assert_same_run, straight_and_resumed, tiny_tokenizer, trained

transformers = pytest.importorskip("transformers")
SIZES = {"n_layer": 5, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, text: Path) -> TrainConfig:
    """A folder with the configuration of a small GPT-2, without weights and tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2Config(**SIZES).save_pretrained(folder)
    return TrainConfig(
        data=(str(text),), model=str(folder), from_config=True, bytes=True, seq_len=32, steps=6, warmup=1, eval_every=3,
        eval_tokens=256, lr=2e-3, device="cpu", dropout=0.0,
    )  # fmt: skip


def test_the_loss_in_chunks_is_the_models(corpus: Corpus, small: TrainConfig) -> None:
    plain, chunked = trained(corpus, small), trained(corpus, small, loss_chunk=64, checkpointing="blocks")
    assert plain.history.train_loss[0] == pytest.approx(math.log(300), abs=0.1)
    assert chunked.history.saved_bytes < 0.5 * plain.history.saved_bytes
    assert chunked.history.train_loss == pytest.approx(plain.history.train_loss, rel=1e-4)
    assert chunked.model.training


@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("loss_chunk", [None, 50])
def test_weights_on_the_host_train_alike(corpus: Corpus, small: TrainConfig, loss_chunk: int | None) -> None:
    """The model's embedding and output layer are one weight."""
    config = small.replace(**BF16_WEIGHTS, loss_chunk=loss_chunk, checkpointing="blocks", step_in_backward=True)
    assert_same_run(trained(corpus, config), trained(corpus, config, weights_on_host="layers"))


def test_half_precision_is_built_without_an_fp32_copy(small: TrainConfig) -> None:
    models: list[torch.nn.Module] = []
    peak = memory.peak_bytes(lambda: models.append(huggingface.build(small.replace(precision="bf16"))))
    [model] = models
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    head = 300 * 32 * 2  # allocated before it is tied to the embedding
    assert peak < 1.05 * memory.tensor_bytes(model.parameters()) + head + 64 * 64  # masks


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_resumes_bit_for_bit_with_dropout(
    corpus: Corpus, small: TrainConfig, tmp_path: Path, compiled: bool
) -> None:
    config = small.replace(dropout=0.1, accumulation=2, compile=compiled)
    assert_same_run(*straight_and_resumed(config, corpus, tmp_path / "run.pt"))


def test_what_is_exported_is_loaded_and_has_the_same_loss(small: TrainConfig, text: Path, tmp_path: Path) -> None:
    folder, exported = tmp_path / "tokens", tmp_path / "exported"
    transformers.GPT2Config(**SIZES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    flags = (
        "--from-config --activation-bits 3 --checkpointing blocks --seq-len 32 --steps 2 --device cpu --eval-tokens 256"
    )
    paths = {"--model": folder, "--data": text, "--export": exported, "--save": tmp_path / "run.pt"}
    main(["train", *flags.split(), *(str(word) for pair in paths.items() for word in pair)])
    config = small.replace(bytes=False, from_config=False, model=str(exported), lr=None)
    corpus = load(config)  # with the folder's tokenizer
    assert corpus.train.dtype == torch.int32
    fine_tuned = Trainer(config, corpus)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert fine_tuned.evaluate() == pytest.approx(saved["history"]["validation"][-1][1], rel=1e-5)
    assert config.peak_lr == pytest.approx(5e-5)
    assert config.replace(from_config=True).peak_lr == pytest.approx(3e-4)


def test_a_folder_that_lacks_weights_is_refused(small: TrainConfig, tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    incomplete = {name: x for name, x in model.state_dict().items() if name != "transformer.ln_f.weight"}
    model.save_pretrained(tmp_path, state_dict=incomplete)
    with pytest.raises(OptionError, match=r"model: .* cannot be built: .* lacks the weights transformer.ln_f.weight"):
        huggingface.build(small.replace(model=str(tmp_path), from_config=False))
