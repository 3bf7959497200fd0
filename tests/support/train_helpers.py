"""For the tests of the training loop: a text, a small configuration, runs and their comparison."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from memkern.__main__ import main
from memkern.techniques.flags import flag
from memkern.techniques.options import spelled
from memkern.train import Corpus, TrainConfig, Trainer, checkpoint, run

TEXT = "".join(f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(1500))
SMALL = TrainConfig(layers=2, heads=2, width=64, seq_len=32, steps=6, warmup=1, eval_every=3, eval_tokens=512)
BF16_WEIGHTS: dict[str, Any] = {"precision": "bf16", "master_weights": "bf16+8", "clip": 0.0}
TORCH_ADAMW: dict[str, Any] = {"optimizer": "torch-adamw", "state_bits": 32}


def small_run_flags(layers: int, batch_size: int, steps: int) -> list[str]:
    """The flags of a small run on the CPU."""
    sizes = {"layers": layers, "heads": 2, "width": 64, "seq-len": 32, "batch-size": batch_size, "steps": steps}
    options = sizes | {"eval-every": 2, "eval-tokens": 320, "device": "cpu"}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters of a trainer's model, detached: a change in place changes the model."""
    return [parameter.detach() for parameter in trainer.model.parameters()]


def trained(corpus: Corpus, config: TrainConfig = SMALL, /, **changes: Any) -> Trainer:
    """The trainer after a run of the configuration with these changes."""
    trainer = Trainer(config.replace(**changes), corpus)
    run([trainer])
    return trainer


def straight_and_resumed(config: TrainConfig, corpus: Corpus, path: Path, **changes: Any) -> tuple[Trainer, Trainer]:
    """An uninterrupted run, and one that goes on from its third step with these changes of the configuration."""
    straight = Trainer(config, corpus)

    def save(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            checkpoint.save(path, trainer.state_dict())

    run([straight], save)
    torch._dynamo.reset()  # as in another process
    resumed = Trainer(config.replace(**changes), corpus)
    torch.manual_seed(99)
    resumed.load_state_dict(checkpoint.load(path))
    assert resumed.steps_done == 3
    run([resumed])
    return straight, resumed


def assert_same_run(a: Trainer, b: Trainer) -> None:
    assert a.history.train_loss == b.history.train_loss
    assert a.history.validation == b.history.validation
    weights_of_a, weights_of_b = a.weights(), b.weights()
    assert all(torch.equal(x, weights_of_b[name]) for name, x in weights_of_a.items())


def assert_runs_agree(a: Path, b: Path) -> None:
    """Asserts that two checkpoints are of equal runs whose gradients were added up in different orders.

    Losses agree within 1e-5, weights within 1e-4 of their norm, as codes of nearly equal moments may differ by one. The
    bias of attention's keys may differ by 1e-5: its gradient is rounding errors alone, which Adam scales up to lr.
    """
    first, second = checkpoint.load(a), checkpoint.load(b)
    assert first["step"] == second["step"] == first["config"]["steps"]
    for name in ("train_loss", "validation"):
        losses = (torch.tensor(state["history"][name]) for state in (first, second))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert first["model"].keys() == second["model"].keys()
    for name, weight in first["model"].items():
        assert (weight - second["model"][name]).norm() <= 1e-4 * weight.norm() + 1e-5, name


def error_of_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``python -m memkern train`` prints for bad arguments: one line, without its beginning."""
    with pytest.raises(SystemExit) as error:
        main(["train", *arguments])
    assert error.value.code == 2
    [line] = capsys.readouterr().err.splitlines()  # and no page of usage before it
    return line.removeprefix("python -m memkern train: error: argument ")


def printed_by_command(*arguments: str) -> str:
    """What ``python -m memkern train`` prints, in a process of the Ranks as in one that torchrun has started."""
    environment = {"WORLD_SIZE": str(dist.get_world_size() if dist.is_initialized() else 1)}
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(printed),
    ):
        main(["train", *arguments])
    return printed.getvalue()


def tiny_tokenizer() -> Any:
    """GPT-2's tokenizer without merges: 256 ids of bytes, and one that ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def flag_with_value(name: str, value: Any) -> str:
    """The flag of a field with a value, as a user types it."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {spelled(value)}"
