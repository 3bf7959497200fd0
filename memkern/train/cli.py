"""``python -m memkern train``: its arguments, and the run from checks to files."""

from __future__ import annotations

import argparse
import importlib.util
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .config import AMP, BASELINES, MODELS, OPTIMIZERS, ArgumentError, TrainConfig
from .large_batch import LR_RULES

DESCRIPTION = """\
Trains a byte-level GPT on text: by default the running Python's own standard library, without its tests.
The last tenth of every file is for validation. An option that is not given has its default, or with --resume
the value that the resumed run began with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options: the fields of TrainConfig, and where to read and write."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = TrainConfig()

    def add(group: Any, name: str, text: str, default: str | None = None, **options: Any) -> None:
        shown = default or getattr(defaults, name)
        options.setdefault("help", f"{text} (default: {shown})")
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **options)

    data = parser.add_argument_group("data and model")
    text = "files, and folders of text files, to train on"
    add(data, "data", text, "Python's standard library", nargs="+", action="extend", metavar="PATH")
    sizes = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in MODELS.items())
    add(data, "model", f"layers x heads x width, {sizes}", choices=list(MODELS))
    add(data, "layers", "number of blocks", "the model's", type=int, metavar="N")
    add(data, "heads", "attention heads", "the model's", type=int, metavar="N")
    add(data, "width", "size of the residual stream", "the model's", type=int, metavar="N")
    add(data, "seq_len", "bytes in a window", type=int, metavar="N")

    training = parser.add_argument_group("training")
    add(training, "optimizer", "one of memkern.optim or torch.optim (torch-)", choices=list(OPTIMIZERS))
    add(training, "steps", "optimizer steps", type=int, metavar="N")
    add(training, "batch_size", "windows in a micro-batch", type=int, metavar="N")
    add(training, "accumulate", "micro-batches in a step", type=int, metavar="N")
    text = "micro-batches in a step for each of --accumulate; the learning rate is scaled by --lr-rule"
    add(training, "batch_factor", text, type=int, metavar="N")
    add(training, "lr_rule", "what the learning rate is multiplied by for it", choices=list(LR_RULES))
    help_ = "save only the blocks' inputs and recompute the blocks in the backward pass"
    add(training, "checkpoint_activations", "", action="store_true", help=help_)
    text = "bits per element that GELU saves for the backward pass, 1 to 4"
    add(training, "activation_bits", text, "torch's GELU", type=int, metavar="N")
    text = "share of the tokens that linear layers save for their weights' gradients"
    add(training, "linear_keep", text, "all", type=float, metavar="X")
    add(training, "amp", "autocast type; fp16 scales the loss", choices=list(AMP))
    rates = "1e-3, Lion 1e-4, LAMB 1e-2, LARS 3e-2"
    add(training, "lr", "peak learning rate", rates, type=float, metavar="X")
    add(
        training,
        "weight_decay",
        "decay of matrices",
        "AdamW and LAMB 0.1, Adam 0, Lion 1, LARS 1e-4",
        type=float,
        metavar="X",
    )
    add(training, "clip", "largest global gradient norm, 0 for none", type=float, metavar="X")
    add(training, "warmup", "steps of linear warm-up", "a tenth, at most 100", type=int, metavar="N")
    add(training, "seed", "initial values and batches", type=int, metavar="N")
    add(training, "device", "cpu, cuda or cuda:N", "cuda if there is one", metavar="NAME")
    add(training, "threads", "CPU threads", "torch's choice", type=int, metavar="N")
    add(training, "eval_every", "steps between validations", type=int, metavar="N")
    add(training, "eval_tokens", "bytes of validation text", type=int, metavar="N")

    files = parser.add_argument_group("files and comparison")
    pairs = ", ".join(f"{ours} with {baseline}" for ours, baseline in BASELINES.items())
    files.add_argument("--compare", action="store_true", help=f"train the baseline beside it: {pairs}")
    files.add_argument("--out", type=Path, metavar="DIR", help="folder for results.json and losses.png")
    help_ = "checkpoint to write, replaced as a whole, at Ctrl-C too (default: none, or that of --resume)"
    files.add_argument("--save", type=Path, metavar="PATH", help=help_)
    add(files, "save_every", "steps between checkpoints", type=int, metavar="N")
    files.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to continue, bit for bit")


class Stopped(KeyboardInterrupt):
    """Ctrl-C, after a checkpoint was written; the message says where."""


def check_installed(names: tuple[str, ...]) -> None:
    """Exits with the cure where a package of the extra [train] is absent."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise SystemExit(f"memkern train needs {' and '.join(absent)}: pip install memkern[train]")


def check_paths(out: Path | None, save: Path | None) -> None:
    """Raises ArgumentError for a path that could not be written at the end of the run. Writes nothing."""
    # os.path rather than pathlib, whose tests raise inside a folder that may not be searched.
    if save is not None:
        if os.path.isdir(save):
            raise ArgumentError("save", f"{str(save)!r} given, which is a folder; allowed: a file")
        if not os.access(save.parent, os.W_OK | os.X_OK):
            raise ArgumentError(
                "save", f"{str(save)!r} given; allowed: a file in an existing folder that can be written"
            )
    if out is not None:
        existing = next(path for path in (out, *out.absolute().parents) if os.path.exists(path))
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
            raise ArgumentError("out", f"{str(out)!r} given; allowed: a folder that exists or can be made")


def main(args: argparse.Namespace) -> None:
    """Checks everything, trains, reports. Raises ArgumentError before anything is written, Stopped at Ctrl-C."""
    check_installed(("rich", "matplotlib") if args.out else ("rich",))
    from . import checkpoint, report
    from .data import load_corpus
    from .interrupt import deferred
    from .loop import Diverged, Trainer, comparison, run
    from .progress import display

    given = {name: value for name, value in vars(args).items() if name in TrainConfig.__dataclass_fields__}
    if "data" in given:
        given["data"] = tuple(given["data"])
    if args.compare and (args.save or args.resume):
        name = "save" if args.save else "resume"
        raise ArgumentError("compare", f"given with --{name}; allowed: without --save and --resume")
    state = checkpoint.load(args.resume) if args.resume else None
    config = TrainConfig(**(state["config"] if state else {}) | given)
    config.validate()
    configs = comparison(config) if args.compare else [config]
    check_paths(args.out, args.save)
    if args.resume and not args.save and not os.access(args.resume.absolute().parent, os.W_OK | os.X_OK):
        raise ArgumentError(
            "resume",
            f"{str(args.resume)!r} given, in a folder that cannot be written, where the run would go on saving; "
            "allowed: with a --save elsewhere",
        )
    save_to = args.save or args.resume
    corpus = load_corpus(config.data, seq_len=config.seq_len)
    trainers = [Trainer(each, corpus) for each in configs]
    if state:
        trainers[0].load_state_dict(state)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)

    print(
        f"{corpus.name} ({corpus.files} files): {len(corpus.train):,} bytes for training, "
        f"{len(corpus.validation):,} for validation"
    )
    with display(trainers) as show, deferred() if save_to else nullcontext(lambda: False) as interrupted:

        def on_step(trainer: Trainer) -> None:
            show(trainer)
            done = trainer.steps_done
            last = done == config.steps
            stop = interrupted() and not last
            if save_to and (stop or last or done % config.save_every == 0):
                checkpoint.save(save_to, trainer.state_dict())
            if stop:
                raise Stopped(f"Saved after step {done} of {config.steps}: go on with --resume {save_to}")

        try:
            results = run(trainers, on_step)
        except Diverged as error:
            raise SystemExit(f"{error}; try a lower --lr or a longer --warmup") from error
    report.print_report(results)
    if args.out:
        from .plot import write_png

        report.write_json(args.out / "results.json", report.to_json(config, corpus, trainers, results))
        write_png(args.out / "losses.png", config, results)
        print(f"Written: {args.out / 'results.json'}, {args.out / 'losses.png'}")
