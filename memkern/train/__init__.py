"""Training language models with memkern's optimizers: the library behind ``python -m memkern train``.

    config = TrainConfig(model="gpt2", from_config=True, steps=100).replace(optimizer="lion", state_bits=8)
    [result] = run([Trainer(config, load(config))])

``config`` the options and their checks; ``data``, ``documents``, ``tokenizers`` and ``tokens`` text to batches;
``model`` the byte-level GPT, ``huggingface`` transformers' models, ``objective`` a model with its loss; ``build`` all
that from a config; ``loop`` the training, ``evaluation`` its validation, ``phases`` its memory; ``distributed`` and
``sharding`` several processes; ``fit`` the planner's choice; ``checkpoint`` the files. ``progress``, ``report``,
``plot`` and ``cli`` need the extra ``[train]``. docs/training.md says how the options work together.
"""

from .build import Source, load
from .config import TrainConfig
from .data import Corpus, load_corpus
from .large_batch import scale_lr
from .loop import Diverged, History, RunResult, Trainer, comparison, run
from .model import GPT

__all__ = [
    "GPT",
    "Corpus",
    "Diverged",
    "History",
    "RunResult",
    "Source",
    "TrainConfig",
    "Trainer",
    "comparison",
    "load",
    "load_corpus",
    "run",
    "scale_lr",
]
