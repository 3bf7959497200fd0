"""Plans a step of one small model of every type that transformers has for text, images or sound.

Each type's default configuration, with two layers where it can have two, is planned for on the CPU. A row has the
outcome: "planned" and the techniques that the model does not run with, or why there is no plan. ``LACKS`` completes
default configurations for training. A type is "not built" where its configuration still lacks something, or where a
package that it needs is not installed.
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
LAYERS, TOKENS = 2, 64
SECONDS_OF_A_PLAN = 100  # at most, of processor time
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
"""What default configurations lack for training, and smaller sizes where a plan would take minutes."""
COLUMNS = (*report.PROVENANCE, "transformers", "type", "model", "outcome", "ruled_out", "seconds")


class TakesLong(BaseException):
    """A plan takes too long. Not an Exception, which the planner would take for the model's own."""


def shallow(config: Any) -> Any:
    """Sets a configuration, and those inside of it, to two layers."""
    for name in DEPTHS:
        depth = getattr(config, name, None)
        if isinstance(depth, int) and depth > LAYERS:
            with contextlib.suppress(NotImplementedError):  # the number follows from others
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
    """The type's configuration with two layers and with all, each if transformers can build a model of it."""
    from transformers import CONFIG_MAPPING

    for change in (shallow, lambda config: config):
        with contextlib.suppress(Exception), torch.device("meta"):  # transformers may raise anything
            config = change(CONFIG_MAPPING[kind](**LACKS.get(kind, {})))
            resolve(config, TOKENS, None, None, None).build(torch.float32)
            yield config


def outcome(kind: str) -> tuple[str, str]:
    """The outcome of a plan ("planned" or the error), and the techniques that it ruled out."""

    def timeout(*_: object) -> None:
        raise TakesLong

    previous = signal.signal(signal.SIGPROF, timeout)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_A_PLAN)  # counts processor time, as the machine may be busy
    try:
        return _outcome(kind)
    except TakesLong:
        return f"takes more than {SECONDS_OF_A_PLAN} s", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _outcome(kind: str) -> tuple[str, str]:
    """The outcome of the first plan that succeeds: with two layers, or with all (other sizes may depend on the number);
    with one sequence, or with two, which batch normalization needs.
    """
    error = "not built: transformers makes no model of the default configuration here"
    for config, size in itertools.product(_built(kind), (1, 2)):
        techniques = memkern.Techniques(state_bits=8, micro_batch=size)
        try:
            plan = memkern.plan(
                config, memory="64GiB", seq_len=TOKENS, device="cpu", techniques=techniques, batch_size=size
            )
        except OptionError as raised:
            error = " ".join(str(raised).split())[:300]
        else:
            return "planned", "; ".join(plan.ruled_out)
    return error, ""


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("planned_models", __doc__)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="default: all")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for kind, model in types():
            if args.types and kind not in args.types:
                continue
            start = time.process_time()
            result, ruled_out = outcome(kind)
            seconds = f"{time.process_time() - start:.1f}"
            yield study.row(provenance, COLUMNS, (kind, model, result, ruled_out, seconds))

    study.write(args.out / "planned-models.csv", rows(), COLUMNS, 5)


if __name__ == "__main__":
    main()
