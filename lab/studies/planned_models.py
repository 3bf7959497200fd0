"""Plans a step of one small model of every type that transformers has for text, images or sound.

Each type's default configuration, with two layers where it can have two, is planned for on the CPU with the
techniques of the plan's table. A row says what came of it: the techniques that the model does not run with, or why
there is no plan. ``LACKS`` has what default configurations lack for training; those that lack what a model needs to be
built, and models that need a package that is not installed, are not built.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch

import memkern
from benchmarks import report
from lab.studies import study
from memkern.planner.inputs import class_of_type
from memkern.planner.models import resolve
from memkern.techniques.options import OptionError

DEPTHS = (  # names of the number of layers in configurations
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers",
)  # fmt: skip
LAYERS, TOKENS, SECONDS = 2, 64, 100  # SECONDS: the limit of a plan
LACKS: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm46v": {"text_config": {"partial_rotary_factor": 0.5}},
    "glm4v": {"text_config": {"partial_rotary_factor": 0.5}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "instructblip": {"image_token_index": 0},
    "longcat_flash": {"n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 2},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "reformer": {"axial_pos_shape": (8, 8)},
    "step3p7": {"text_config": {"sliding_window": 32}},
    "xmod": {"default_language": "en_XX"},
}
"""What default configurations lack for training, or have so much of that a plan takes minutes."""
COLUMNS = (*report.PROVENANCE, "transformers", "type", "model", "outcome", "ruled_out", "seconds")


class TakesLong(BaseException):
    """A plan takes too long. Not an Exception, which the planner would take for the model's own."""


def shallow(config: Any) -> Any:
    """The configuration with two layers, and those inside of it."""
    for name in DEPTHS:
        depth = getattr(config, name, None)
        if isinstance(depth, int) and depth > LAYERS:
            with contextlib.suppress(NotImplementedError):  # raised by transformers where it follows from other numbers
                setattr(config, name, LAYERS)
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            shallow(value)
    return config


def types() -> Iterator[tuple[str, str]]:
    """Every model type, and its class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for kind in sorted(CONFIG_MAPPING_NAMES):
        if (model := class_of_type(kind)) is not None:
            yield kind, model


def _built(kind: str) -> Iterator[Any]:
    """The type's configuration with few layers and with all, where transformers makes models of them."""
    from transformers import CONFIG_MAPPING

    for changed in (shallow, lambda config: config):
        with contextlib.suppress(Exception), torch.device("meta"):  # transformers' own, of any kind
            config = changed(CONFIG_MAPPING[kind](**LACKS.get(kind, {})))
            resolve(config, TOKENS, None, None, None).build(torch.float32)
            yield config


def outcome(kind: str) -> tuple[str, str]:
    """The outcome of a plan: "planned" or the error, and what was ruled out."""

    def timeout(*_: object) -> None:
        raise TakesLong

    before = signal.signal(signal.SIGPROF, timeout)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # processor time, as others use the processor too
    try:
        return _outcome(kind)
    except TakesLong:
        return f"takes more than {SECONDS} s", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _outcome(kind: str) -> tuple[str, str]:
    """The outcome with few layers, or with all, where a model's other sizes depend on their number; batch normalization
    needs two sequences."""
    found = "not built: transformers makes no model of the default configuration here"
    for config, size in itertools.product(_built(kind), (1, 2)):
        techniques = memkern.Techniques(state_bits=8, micro_batch=size)
        try:
            made = memkern.plan(
                config, memory="64GiB", seq_len=TOKENS, device="cpu", techniques=techniques, batch_size=size
            )
        except OptionError as error:
            found = " ".join(str(error).split())[:300]
        else:
            return "planned", "; ".join(made.ruled_out)
    return found, ""


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("planned_models", __doc__)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="default: all")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for kind, model in types():
            if args.types and kind not in args.types:
                continue
            began = time.process_time()
            found, ruled_out = outcome(kind)
            seconds = f"{time.process_time() - began:.1f}"
            yield study.row(provenance, COLUMNS, (kind, model, found, ruled_out, seconds))

    study.write(args.out / "planned-models.csv", rows(), COLUMNS, 5)


if __name__ == "__main__":
    main()
