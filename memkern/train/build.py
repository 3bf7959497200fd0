"""From the options of a run to its data, model, optimizer and schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from ..applying import apply, make_optimizer, optimizer_groups, weight_dtype
from ..options import OptionError
from .config import TrainConfig
from .data import Corpus, load_corpus
from .distributed import Processes
from .model import GPT
from .objective import ByteModel, LanguageModel, Objective


@dataclasses.dataclass(frozen=True)
class Source:
    """A run's data, and what its model is made of: for models of transformers their configuration and tokenizer."""

    corpus: Corpus
    hf_config: Any = None
    tokenizer: Any = None


def load(config: TrainConfig) -> Source:
    """Reads the text that ``config`` names, as its model needs it. Raises OptionError for what cannot be used."""
    if config.is_preset:
        return Source(load_corpus(config.data, seq_len=config.seq_len, text_field=config.text_field))
    from . import huggingface
    from .documents import read_documents
    from .tokens import token_corpus

    hf_config = huggingface.load_config(config)
    huggingface.auto_class(hf_config)
    huggingface.check_seq_len(config, hf_config)
    documents = read_documents(config.data, text_field=config.text_field)
    tokenizer = huggingface.load_tokenizer(config, hf_config, documents.train)
    return Source(token_corpus(config, documents, tokenizer), hf_config, tokenizer)


def resolved(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """The config with epochs converted to steps. Raises OptionError for a warm-up that is not shorter than the run."""
    per_epoch = corpus.steps_per_epoch(config)
    if config.epochs is not None:
        config = dataclasses.replace(config, steps=max(1, round(config.epochs * per_epoch)))
    if config.warmup_epochs is not None:
        config = dataclasses.replace(config, warmup=round(config.warmup_epochs * per_epoch))
    config.validate()
    return config


def build_objective(config: TrainConfig, source: Source, device: torch.device) -> Objective:
    """The model with its loss on the device, compressed and checkpointed as the options say.

    With weights_on_host it is on the host: :func:`~.distributed.data_parallel` brings its blocks to the device.
    """
    objective: Objective
    techniques = config.techniques
    if techniques.weights_on_host:
        device = torch.device("cpu")
    if config.is_preset:
        layers, heads, width = config.shape
        gpt = GPT(layers=layers, heads=heads, width=width, seq_len=config.seq_len)
        objective = ByteModel(gpt.to(device, weight_dtype(techniques)), techniques.loss_chunk)
    else:
        from . import huggingface

        model = huggingface.build(config, source.hf_config).to(device)
        objective = LanguageModel(model, techniques.loss_chunk)
    if techniques.weights_on_host:
        check_streamable(objective)
    apply(objective.model, techniques.replace(weights_on_host=None))
    return objective


def check_streamable(objective: Objective) -> None:
    """Raises OptionError for a model whose weights cannot stay on the host."""
    from ..stream.streaming import check

    check(objective)


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the techniques, with weight decay for matrices; torch's Adam and AdamW are its fused ones."""
    groups = optimizer_groups(model, config.techniques, lr=config.peak_lr, weight_decay=config.decay)
    options: dict[str, Any] = {}
    if config.techniques.is_torch:
        # torch 2.13's fused SGD writes garbage into bf16 weights on a CPU, and takes no DTensors.
        options = {"foreach": False} if config.techniques.algorithm == "sgd" else {"fused": True}
    if config.clips_in_step:
        options["max_grad_norm"] = config.max_norm
    return make_optimizer(groups, config.techniques, lr=config.peak_lr, **options)


def schedule(config: TrainConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """``warmup_cosine`` with the options' warm-up."""
    start = None if config.warmup_from == "zero" else config.base_lr / config.peak_lr
    return warmup_cosine(optimizer, warmup=config.warmup_steps, steps=config.steps, start=start)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, *, warmup: int, steps: int, start: float | None = None
) -> LRScheduler:
    """A linear warm-up by iteration, then a cosine from lr to lr / 10 at the last step.

    ::

        lr * (t + 1) / (warmup + 1)                       for t < warmup, by default
        lr * (start + (1 - start) * t / warmup)           with start: from start * lr to lr

    The second, from the rate of the base batch to the scaled one, is that of Goyal et al., arXiv 1706.02677, section
    2.2.
    """
    lr = optimizer.param_groups[0]["lr"]
    factor = 1 / (warmup + 1) if start is None else start
    linear = LinearLR(optimizer, start_factor=factor, total_iters=warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=lr / 10)
    return SequentialLR(optimizer, [linear, cosine], milestones=[warmup])


def resolve_device(config: TrainConfig, group: Processes | None = None) -> torch.device:
    """The device to train on; of several processes each has the CUDA device of its local rank.

    Raises OptionError where it is absent or cannot do what --precision asks.
    """
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and group is not None and group.world > 1:
        name = f"cuda:{group.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError("device", f"{name!r} given; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            others = f", cuda:0 to cuda:{count - 1}" if count else ""
            raise OptionError("device", f"{name!r} given, of {count} CUDA devices; allowed: cpu{others}")
        precision = config.techniques.precision
        if precision.startswith("bf16") and not torch.cuda.is_bf16_supported():
            allowed = "allowed: fp32, fp16-mixed"
            raise OptionError("precision", f"{precision!r} given, which {name!r} does not support; {allowed}")
    return device
