"""Training language models with memkern's optimizers: the library behind ``python -m memkern train``.

    config = TrainConfig(model="gpt2", from_config=True, steps=100).replace(optimizer="lion", state_bits=8)
    [result] = run([Trainer(config, load(config))])

Modules: ``config`` has the options and their checks, ``data`` cuts text into batches, ``model`` has the byte-level GPT
and the loss of each model, ``huggingface`` loads transformers' models and tokenizers, ``loop`` trains, ``distributed``
trains in several processes, ``fit`` has the planner choose techniques, ``checkpoint`` writes and reads files,
``interrupt`` defers signals, ``report`` prints results, ``cli`` is the command. docs/training.md explains the options.
"""

from .config import TrainConfig
from .data import Corpus, load_corpus
from .loop import History, Trainer, load, run
from .model import GPT

__all__ = ["GPT", "Corpus", "History", "TrainConfig", "Trainer", "load", "load_corpus", "run"]
