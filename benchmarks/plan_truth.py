"""python -m benchmarks.plan_truth: what memkern.plan predicts beside what a training step needs, on the CPU.

Each case in processes of its own: one that notes by how much the resident set grows at most, one that notes the peak of
torch's CPU allocator (profile_memory), after two steps and with everything loaded that a small model of the same kind
needs. Memory that is freed goes back to the system (MALLOC_MMAP_THRESHOLD_=65536), which glibc else delays for blocks
of up to 32 MiB. ``--published``: the bytes of a forward pass on fake CUDA tensors beside published ones.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from memkern.planner.techniques import Techniques

HERE = Path(__file__).parent
MIB = 2**20


class Case(NamedTuple):
    model: str
    seq_len: int
    techniques: dict[str, Any]
    dropout: float | None = 0.0


FRUGAL = {"precision": "bf16", "master_weights": "bf16+8", "state_bits": 8, "step_in_backward": True}
CASES = (
    Case("gpt2", 512, {}),
    Case("gpt2", 512, {"checkpointing": "blocks"}),
    Case("gpt2", 512, {"checkpointing": "sqrt", "optimizer": "torch.AdamW"}),
    Case("gpt2", 512, {"precision": "amp"}),
    Case("gpt2", 512, {"state_bits": 8, "micro_batch": 2, "accumulation": 2, "activation_bits": 3}),
    Case("gpt2", 512, {"saved_bits": 8, "micro_batch": 2}),
    Case("gpt2", 512, {"step_in_backward": True, "loss_chunk": 4096}),
    Case("gpt2-medium", 512, FRUGAL | {"checkpointing": "blocks", "loss_chunk": 4096}),
    Case("bert-base", 256, {"randomized_linear": 0.2, "micro_batch": 4, "state_bits": 8}, None),
    Case("roberta-base", 256, {"precision": "bf16", "master_weights": "bf16+16", "micro_batch": 4}),
    Case("vit-base", 0, {"saved_bits": "exact", "micro_batch": 8}),
    Case(
        "bert-large", 128, {"optimizer": "Lion", "state_bits": 8, "micro_batch": 4, "checkpointing": "sqrt"}
    ),
)


def source_of(case: Case, small: bool = False) -> Any:
    from memkern.planner.models import resolve

    source: Any = resolve(case.model, case.seq_len or None, None, None, case.dropout)
    if small:
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        for name, value in zip(names, (4, 64, 4, 256, 1000), strict=True):
            if hasattr(source.config, name):
                setattr(source.config, name, value)
    return source


def trainer(source: Any, techniques: Techniques) -> tuple[Any, Any, Callable[[], None]]:
    """The model, its optimizer and a function that takes a step."""
    import torch

    from memkern.planner import step

    torch.manual_seed(0)
    model = source.build(step.weight_dtype(techniques), empty=False)
    step.prepare(model, techniques)
    gc.collect()
    optimizer = step.make_optimizer(list(model.parameters()), techniques, lr=1e-5)
    batch = source.batch(techniques.micro_batch)
    if techniques.precision == "bf16":
        batch = step.floats_to(batch, torch.bfloat16)

    def take() -> None:
        for _ in range(techniques.accumulation):
            amp = techniques.precision == "amp"
            with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
                if techniques.loss_chunk:
                    loss = step.chunked_loss(model, batch, techniques.loss_chunk)
                else:
                    loss = source.loss(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, take


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def resident_growth(case: Case) -> int:
    """By how much the resident set grows at most over three steps."""
    techniques = Techniques(**case.techniques)
    held = trainer(source_of(case, small=True), techniques)
    held[2]()
    del held
    gc.collect()
    before = _status("VmRSS")
    _model, _optimizer, take = trainer(source_of(case), techniques)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: not that of building the model
    for _ in range(3):
        take()
    return _status("VmHWM") - before


def allocated_peak(case: Case) -> int:
    """The peak of torch's allocator in the third step."""
    from torch.profiler import ProfilerActivity, profile

    from memkern import memory

    model, optimizer, take = trainer(source_of(case), Techniques(**case.techniques))
    take()
    take()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        take()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return (
        peak
        + memory.tensor_bytes([*model.parameters(), *model.buffers()])
        + memory.optimizer_bytes(optimizer)
    )


def measured(number: int, what: str) -> int:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.plan_truth", "--measure", str(number), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.splitlines()[-1])


COLUMNS = (
    *("model", "seq_len", "techniques", "predicted_mib", "allocated_mib", "resident_mib"),
    *("predicted_over_allocated", "predicted_over_resident"),
)


def row(number: int) -> dict[str, str]:
    """A case: predicted and measured MiB, without the process."""
    from memkern.planner.hardware import DEFAULTS
    from memkern.planner.planning import Planner

    case = CASES[number]
    planner = Planner(source_of(case), "cpu", "cpu", DEFAULTS["cpu"])
    prediction = planner.predict(Techniques(**case.techniques))
    predicted = prediction.peak - prediction.categories["process and context"]
    allocated, resident = measured(number, "allocated"), measured(number, "resident")
    words = json.dumps(case.techniques | ({} if case.dropout == 0 else {"dropout": case.dropout}))
    sizes = [f"{size / MIB:.1f}" for size in (predicted, allocated, resident)]
    ratios = [f"{predicted / allocated:.4f}", f"{predicted / resident:.4f}"]
    return dict(zip(COLUMNS, (case.model, str(case.seq_len), words, *sizes, *ratios), strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_truth", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder (default: benchmarks/results)"
    )
    args = parser.parse_args(argv)
    if args.measure:
        function = {"allocated": allocated_peak, "resident": resident_growth}[args.measure[1]]
        print(function(CASES[int(args.measure[0])]))
        return
    import transformers

    from . import machine, report

    path = args.out / "plan-truth.csv"
    provenance = machine.provenance("cpu") | {"transformers": transformers.__version__}
    for number in args.cases:
        figures = row(number)
        print(number, *figures.values(), flush=True)
        report.append(path, [provenance | figures], (*provenance, *COLUMNS))
    print(path)


if __name__ == "__main__":
    main()
