"""``python -m memkern``, the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .planner import cli as plan_cli
from .techniques.flags import flag
from .techniques.options import OptionError

DESCRIPTION = "info shows what is installed, plan what fits, train trains a language model."


def lines(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """``value`` as indented names and texts; nested dicts become nested lines."""
    label = "  " * depth + name
    if isinstance(value, dict) and set(value) == {"available", "reason"}:
        yield label, "yes" if value["available"] else f"no: {value['reason']}"
    elif isinstance(value, dict):
        yield label, ""
        for key, inner in value.items():
            yield from lines(key, inner, depth + 1)
    elif isinstance(value, list | tuple):
        yield label, " ".join(map(str, value)) or "none"
    elif value is None or isinstance(value, bool):
        yield label, {True: "yes", False: "no", None: "none"}[value]
    else:
        yield label, str(value) or "none"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")

    def refuse(self, error: OptionError) -> NoReturn:
        """The error of an option, or of a variable of the environment, by its name."""
        self.error(f"argument {error.name if error.name.isupper() else flag(error.name)}: {error.message}")


def info(args: argparse.Namespace) -> None:
    """Prints ``memkern.backend.report()``."""
    from . import backend

    report = backend.report()
    if args.json:
        print(json.dumps(report, indent=2))
        return
    pairs = [pair for key, value in report.items() for pair in lines(key, value)]
    width = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        print(f"{label:<{width}}  {text}".rstrip())


def check_environment() -> None:
    """Raises OptionError for a MEMKERN_BACKEND that cannot be used."""
    from . import backend

    try:
        backend.from_environment()
    except (ValueError, RuntimeError) as error:
        raise OptionError("MEMKERN_BACKEND", str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; an option that cannot be used ends it with status 2 and a line that says why."""
    parser = Parser(prog="python -m memkern", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    info_parser = commands.add_parser("info", help="versions, backends, CPU features, build")
    info_parser.add_argument("--json", action="store_true", help="as JSON")
    help_ = "what a training step needs, and what to use so that it fits"
    plan_parser = commands.add_parser("plan", help=help_)
    plan_cli.add_arguments(plan_parser)
    train_parser = commands.add_parser("train", help="train a language model on text")
    argv = sys.argv[1:] if argv is None else argv
    if [*argv[:1]] == ["train"]:
        from .train import cli as train_cli  # and torch, which a plan on fake CUDA tensors needs in another process

        train_cli.add_arguments(train_parser)
    args = parser.parse_args(argv)
    if args.command == "info":
        return info(args)
    if args.command == "plan":
        try:
            check_environment()
            sys.exit(plan_cli.main(args))
        except OptionError as error:
            plan_parser.refuse(error)
    try:
        check_environment()
        train_cli.main(args)
    except OptionError as error:
        train_parser.refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    try:
        main()
        if sys.stdout is not None:  # closed: >&-
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
