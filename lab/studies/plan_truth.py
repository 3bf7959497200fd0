"""Compares memkern.plan's predictions with training steps that are measured on the CPU.

Each case runs in a process of its own. A step of a small model of the same kind first loads what any step needs. Then
two steps give the largest growth of the resident set, and a third the peak of torch's CPU allocator (profile_memory).
glibc keeps freed blocks of up to 32 MiB for a while; mallopt's M_MMAP_THRESHOLD returns them to the system at once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lab.studies import study
from memkern.techniques.options import Techniques

MIB = 2**20


class Case(NamedTuple):
    model: str  # a name that the planner knows, or a key of OTHERS
    seq_len: int  # tokens of a sequence; 0 for images
    techniques: dict[str, Any]  # arguments of Techniques
    dropout: float | None = 0.0  # None for the probabilities of the model's configuration
    attention_mask: bool = False  # whether batches have a mask


FRUGAL = {"precision": "bf16", "master_weights": "bf16+8", "state_bits": 8, "step_in_backward": True}
MOE = {
    "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 16000,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": MOE | {"num_local_experts": 8},
    "qwen3_moe": MOE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64},
    "gpt_oss": MOE | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
}
"""Small models of mixtures of experts, by their type."""
LLAMA = {
    "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, sizes) for kind, sizes in EXPERTS.items()} | {
    "llama": ("llama", LLAMA),
    "bert-large": (
        "bert",
        {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 4096},
    ),
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
}
"""Models whose names the planner does not know: by name, their type in transformers and their configuration."""
EVERY_OTHER_BLOCK: dict[str, Any] = {"checkpointing": "blocks", "checkpoint_every": 2}
CASES = (
    Case("distilgpt2", 256, {}),
    Case("distilgpt2", 256, {"checkpointing": "blocks", "micro_batch": 2}),
    Case("gpt2", 128, {**EVERY_OTHER_BLOCK, "optimizer": "torch-adamw", "micro_batch": 2}),
    Case("distilgpt2", 256, {"precision": "bf16-mixed"}),
    Case("distilgpt2", 128, {"state_bits": 8, "micro_batch": 2, "accumulation": 2, "activation_bits": 3}),
    Case("gpt2", 128, {"step_in_backward": True, "loss_chunk": 4096}),
    Case("gpt2-medium", 128, FRUGAL | {"checkpointing": "blocks", "loss_chunk": 4096}),
    Case("bert-base", 128, {"linear_share": 0.2, "micro_batch": 2, "state_bits": 8}, None),
    Case("roberta-base", 128, {"precision": "bf16", "master_weights": "bf16+16", "micro_batch": 2}),
    Case("vit-base", 0, {"micro_batch": 2}),
    Case("bert-large", 64, {"optimizer": "lion", "state_bits": 8, "micro_batch": 2, **EVERY_OTHER_BLOCK}),
    Case("mixtral", 256, {"micro_batch": 2}),
    Case("qwen3_moe", 256, {"micro_batch": 2, "state_bits": 8, "checkpointing": "blocks"}),
    Case("gpt_oss", 256, {"micro_batch": 2}),
    Case("distilgpt2", 512, {"micro_batch": 4}, attention_mask=True),
    Case("bert-base", 256, {"micro_batch": 4, "checkpointing": "blocks"}, attention_mask=True),
    Case("distilgpt2", 512, {"compile": True, "micro_batch": 4}),
    Case("distilgpt2", 512, {"compile": True, "saved_bits": 8, "precision": "bf16-mixed", "micro_batch": 4}),
    Case("llama", 1024, {"compile": True, "saved_bits": "exact", "micro_batch": 2}),
    Case("llama", 1024, {"compile": True, "saved_bits": 8, "micro_batch": 4}),
    Case("llama", 1024, {"compile": True, "precision": "bf16-mixed", "micro_batch": 4, "checkpointing": "blocks"}),
    Case("vit-base", 0, {"compile": True, "saved_bits": 8, "micro_batch": 8}),
    Case("bert-base", 256, {"compile": True, "saved_bits": "exact", "precision": "bf16-mixed", "micro_batch": 8}),
    Case("bert-base", 256, {"compile": True, "memory_budget": 0.6, "micro_batch": 8, "step_in_backward": True}),
)


def source_of(case: Case, small: bool = False) -> Any:
    """The case's model as the planner resolves it. small: with four layers of width 64."""
    from memkern.planner.models import resolve

    model: Any = case.model
    if model in OTHERS:
        import transformers

        kind, sizes = OTHERS[model]
        model = transformers.CONFIG_MAPPING[kind](**sizes)
    source: Any = resolve(model, case.seq_len or None, None, None, case.dropout, case.attention_mask)
    if small:
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        for name, value in zip(names, (4, 64, 4, 256, 1000), strict=True):
            if hasattr(source.config, name):
                setattr(source.config, name, value)
    return source


def trainer(source: Any, techniques: Techniques) -> tuple[Any, Any, Callable[[], None]]:
    """The model, its optimizer and a function that takes a step."""
    import torch

    from memkern.planner import fake_step
    from memkern.techniques import applying

    torch.manual_seed(0)
    model = source.build(applying.weight_dtype(techniques))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)  # memory is resident only once it is written
    applying.apply(model, techniques)
    gc.collect()
    optimizer = applying.make_optimizer(list(model.parameters()), techniques, lr=1e-5)
    batch = source.batch(techniques.micro_batch)
    if techniques.precision == "bf16":
        batch = fake_step.floats_to(batch, torch.bfloat16)

    def take_step() -> None:
        for _ in range(techniques.accumulation):
            with applying.autocast(techniques, "cpu"):
                if techniques.loss_chunk:
                    loss = fake_step.chunked_loss(model, batch, techniques.loss_chunk)
                else:
                    loss = source.loss(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, take_step


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def predicted(case: Case) -> int:
    """The planner's peak in bytes, without the bytes that a process has before it holds a tensor."""
    from memkern.planner.hardware import DEFAULTS
    from memkern.planner.prediction import Predictor

    predictor = Predictor(source_of(case), "cpu", "cpu", DEFAULTS["cpu"])
    prediction = predictor.predict(Techniques(**case.techniques))
    return prediction.peak - prediction.categories["process and context"]


def measure(case: Case) -> dict[str, int]:
    """The predicted bytes, the largest growth of the resident set, and the peak of torch's allocator."""
    import torch

    from benchmarks.harness import largest_temporary
    from memkern import memory

    torch.set_num_threads(1)
    memory.return_freed_memory()
    figures = {"predicted": predicted(case)}
    techniques = Techniques(**case.techniques)
    *_, small_step = trainer(source_of(case, small=True), techniques)
    small_step()  # loads what any step needs
    gc.collect()
    before = _status("VmRSS")
    model, optimizer, take_step = trainer(source_of(case), techniques)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which building the model has raised
    take_step()
    take_step()
    figures["resident"] = _status("VmHWM") - before
    peak = largest_temporary(take_step, "cpu")
    held = memory.tensor_bytes([*model.parameters(), *model.buffers()]) + memory.optimizer_bytes(optimizer)
    return figures | {"allocated": peak + held}


def row(number: int) -> dict[str, str]:
    """Measures a case in a process of its own; returns its row."""
    case = CASES[number]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        figures = pool.apply(measure, (case,))
    others: dict[str, Any] = {} if case.dropout == 0 else {"dropout": "as configured"}
    others |= {"attention_mask": True} if case.attention_mask else {}
    settings = json.dumps(case.techniques | others)
    sizes = [f"{figures[name] / MIB:.1f}" for name in ("predicted", "allocated", "resident")]
    ratios = [f"{figures['predicted'] / figures[name]:.4f}" for name in ("allocated", "resident")]
    return dict(zip(COLUMNS, (case.model, str(case.seq_len), settings, *sizes, *ratios), strict=True))


COLUMNS = (
    *("model", "seq_len", "techniques", "predicted_mib", "allocated_mib", "resident_mib"),
    *("predicted_over_allocated", "predicted_over_resident"),
)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("plan_truth", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    import transformers

    from benchmarks import machine, report
    from memkern.planner import fake_step  # noqa: F401  (so that the processes need not import torch)

    path = args.out / "plan-truth.csv"
    provenance = machine.provenance("cpu") | {"transformers": transformers.__version__}
    for number in args.cases:
        figures = row(number)
        print(number, *figures.values(), flush=True)
        report.append(path, [provenance | figures], (*provenance, *COLUMNS))
    print(path)


if __name__ == "__main__":
    main()
