"""Training language models with memkern's optimizers: the library behind ``python -m memkern train``.

    config = TrainConfig(model="gpt2", from_config=True, steps=100).replace(optimizer="lion", state_bits=8)
    [result] = run([Trainer(config, load(config))])

``config`` the options and their checks; ``data`` text to batches; ``model`` the byte-level GPT and models with their
loss, ``huggingface`` transformers' models and tokenizers; ``loop`` the training; ``distributed`` several processes;
``fit`` the planner's choice; ``checkpoint`` the files; ``interrupt`` signals; ``report`` the results; ``cli`` the
command. docs/training.md says how the options work together.
"""

from .config import TrainConfig
from .data import Corpus, load_corpus
from .loop import History, Trainer, load, run
from .model import GPT

__all__ = ["GPT", "Corpus", "History", "TrainConfig", "Trainer", "load", "load_corpus", "run"]
