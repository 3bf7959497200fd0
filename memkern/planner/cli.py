"""``python -m memkern plan``: its arguments, and what it prints: the plan as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json

from ..techniques.flags import add_flags
from ..techniques.options import Techniques, not_allowed
from .planning import plan

DESCRIPTION = """\
Says what a training step of a model needs with each technique, and which to use so that it fits. Techniques that are
given are used, the others chosen. Exit status: 0, something fits; 1, nothing does; 2, an argument cannot be used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--model", required=True, metavar="NAME|FOLDER", help="built-in name, or a transformers model")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="such as 12GiB: all that a process may use")
    text = "such as 64GiB: what --offload and --weights-on-host may use on the host (default: any)"
    parser.add_argument("--host-memory", metavar="SIZE", help=text)
    text = "tokens of a sequence; not for images (default: 2048, or the model's positions)"
    parser.add_argument("--seq-len", type=int, metavar="N", help=text)
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda or cpu (default: cuda)")
    text = "sequences of an optimizer step (default: 1)"
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help=text)
    text = "largest global gradient norm, 0 for none (default); clipping rules a step in backward out"
    parser.add_argument("--clip", type=float, default=0.0, metavar="X", help=text)
    text = "all dropout rates (default: the configuration's)"
    parser.add_argument("--dropout", type=float, metavar="X", help=text)
    text = "how many share the model with fully_shard (FSDP2; HSDP: those of a group); bytes are of one (default: 1)"
    parser.add_argument("--devices", type=int, default=1, metavar="N", help=text)
    text = "sequences end in padding: attention reads a mask of seq-len x seq-len for each"
    parser.add_argument("--attention-mask", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    group = parser.add_argument_group("techniques")
    add_flags(group, Techniques, dataclasses.fields(Techniques))


def main(args: argparse.Namespace) -> int:
    """Prints the plan; returns 0 where something fits, else 1. Raises OptionError."""
    names = [field.name for field in dataclasses.fields(Techniques)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if importlib.util.find_spec("transformers") is None:
        raise not_allowed("model", args.model, "with transformers installed, which the extra memkern[train] brings")
    from transformers.utils import logging

    logging.set_verbosity_error()
    options = {name: getattr(args, name) for name in ("memory", "seq_len", "device", "batch_size", "clip", "dropout")}
    options |= {name: getattr(args, name) for name in ("host_memory", "devices", "attention_mask")}
    outcome = plan(args.model, techniques=given, **options)
    print(json.dumps(outcome.to_dict(), indent=1) if args.json else outcome)
    return 0 if outcome.fits else 1
