"""What the tests of the training loop share: a text, a small configuration, runs and their comparison."""

import os
import socket
import subprocess
import sys
from typing import Any

import torch

from memkern import memory
from memkern.techniques.flags import flag
from memkern.techniques.options import spelled
from memkern.train import Corpus, TrainConfig, Trainer, run

TEXT = "".join(f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(1500))
SMALL = TrainConfig(layers=2, heads=2, width=64, seq_len=32, steps=6, warmup=1, eval_every=3, eval_tokens=512)
ADAMW8: dict[str, Any] = {"optimizer": "adamw", "state_bits": 8}
LION: dict[str, Any] = {"optimizer": "lion", "state_bits": 32}
LION8: dict[str, Any] = {"optimizer": "lion", "state_bits": 8}
TORCH_ADAMW: dict[str, Any] = {"optimizer": "torch-adamw", "state_bits": 32}
TORCH_ADAM: dict[str, Any] = {"optimizer": "torch-adam", "state_bits": 32}


def small_run(layers: int, batch_size: int, steps: int) -> list[str]:
    """The flags of a small run on the CPU."""
    sizes = {"layers": layers, "heads": 2, "width": 64, "seq-len": 32, "batch-size": batch_size, "steps": steps}
    run = {"eval-every": 2, "eval-tokens": 320, "device": "cpu"}
    return [word for name, value in (sizes | run).items() for word in (f"--{name}", str(value))]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def step_peak(trainer: Trainer) -> int:
    """The largest number of tensor bytes during one more step."""
    return memory.peak_bytes(trainer.step, trainer.model, trainer.optimizer)


def trained(corpus: Corpus, **changes: Any) -> Trainer:
    trainer = Trainer(SMALL.replace(**changes), corpus)
    run([trainer])
    return trainer


def assert_same_run(a: Trainer, b: Trainer) -> None:
    assert a.history.train_loss == b.history.train_loss
    assert a.history.validation == b.history.validation
    assert all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def train_by_two(*arguments: str) -> list[str]:
    """``python -m memkern train`` in two processes, as torchrun starts them; what each prints."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "memkern", "train", *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    return printed


def tiny_tokenizer() -> Any:
    """GPT-2's of bytes, without merges: 256 ids and one that ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def typed(name: str, value: Any) -> str:
    """The flag of a field with a value."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {spelled(value)}"
