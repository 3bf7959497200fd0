"""Training a byte-level GPT with memkern's optimizers: the library behind ``python -m memkern train``.

    config = TrainConfig(optimizer="adamw8bit", steps=100)
    corpus = load_corpus(["src"], seq_len=config.seq_len)
    [result] = run([Trainer(config, corpus)])

``config`` the options and their checks, ``data`` text to batches, ``model`` the GPT, ``loop`` the training,
``checkpoint`` the files; ``progress``, ``report``, ``plot`` and ``cli`` need the extra ``[train]``.
"""

from .config import ArgumentError, TrainConfig
from .data import Corpus, load_corpus
from .large_batch import scale_lr
from .loop import Diverged, History, RunResult, Trainer, comparison, run
from .model import GPT

__all__ = [
    "GPT",
    "ArgumentError",
    "Corpus",
    "Diverged",
    "History",
    "RunResult",
    "TrainConfig",
    "Trainer",
    "comparison",
    "load_corpus",
    "run",
    "scale_lr",
]
