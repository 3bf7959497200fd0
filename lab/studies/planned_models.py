"""Plans a step of one small model of every type that transformers has for text, images or sound.

Each type's default configuration, with two layers where it can have two, is planned for as ``memkern.plan`` does on the
CPU, with the techniques of its table. A row says what came of it: the techniques that the model does not run with, or
why there is no plan.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

from lab.studies import study

DEPTHS = (
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers",
)  # fmt: skip
LAYERS, TOKENS, SECONDS = 2, 64, 300
COLUMNS = (
    "date", "commit", "dirty", "hardware", "python", "torch", "memkern", "transformers", "type", "model", "outcome",
    "ruled_out", "seconds",
)  # fmt: skip


def shallow(config: Any) -> Any:
    """The configuration with two layers, and those inside of it."""
    for name in DEPTHS:
        depth = getattr(config, name, None)
        if isinstance(depth, int) and depth > LAYERS:
            setattr(config, name, LAYERS)
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            shallow(value)
    return config


def types() -> Iterator[tuple[str, str]]:
    """Every model type, and its class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from memkern.planner.inputs import classes_of_type

    for kind in sorted(CONFIG_MAPPING_NAMES):
        for model in classes_of_type(kind):
            yield kind, model
            break


def _plan(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    import memkern
    from memkern.options import OptionError

    asked: dict[str, Any] = {"memory": "64GiB", "seq_len": TOKENS, "device": "cpu"}
    asked["techniques"] = memkern.Techniques(state_bits=8, precision="bf16")
    try:
        config = shallow(CONFIG_MAPPING[kind]())
        return memkern.plan(config, **asked)
    except (
        OptionError,
        ValueError,
        AttributeError,
    ):  # of the layers: some models' other sizes depend on them
        return memkern.plan(CONFIG_MAPPING[kind](), **asked)


def outcome(kind: str) -> tuple[str, str]:
    """What came of a plan: "planned" or the error, and what was ruled out."""
    try:
        made = _plan(kind)
    except Exception as error:  # any may come from transformers' own code
        return " ".join(f"{type(error).__name__}: {error}".split())[:300], ""
    return "planned", "; ".join(made.ruled_out)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("planned_models", __doc__)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="default: all")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def timeout(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s")

    signal.signal(signal.SIGALRM, timeout)

    def rows() -> Iterator[dict[str, str]]:
        for kind, model in types():
            if args.types and kind not in args.types:
                continue
            began = time.process_time()
            signal.alarm(SECONDS)
            found, ruled_out = outcome(kind)
            signal.alarm(0)
            seconds = f"{time.process_time() - began:.1f}"
            yield study.row(provenance, COLUMNS, (kind, model, found, ruled_out, seconds))

    study.write(args.out / "planned-models.csv", rows(), COLUMNS, 5)


if __name__ == "__main__":
    main()
