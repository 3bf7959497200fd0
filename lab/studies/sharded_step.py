"""A step of DTensor shards beside one of plain tensors of the same local sizes.

GPT-2's 148 tensors, of which this process has the first of two shards; no collective is run (a fake process group), so
what is measured is the cost of DTensors in a step. CPU time of one thread, interleaved in one process; medians. The
last case is a tensor whose shards end inside blocks, whose step runs on the reference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine, report
from benchmarks.bench_optim import GPT2, gpt2_shapes
from benchmarks.harness import take_turns
from lab.studies import study
from memkern import optim
from memkern.optim.dtensor.shards import local

WORLD = 2
COLUMNS = (*report.PROVENANCE, "optimizer", "parameters", "plain_ms", "sharded_ms", "ratio")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW8bit": optim.AdamW8bit,
    "AdamW": optim.AdamW,
    "Lion8bit": optim.Lion8bit,
    "LAMB8bit": optim.LAMB8bit,
    "LARS8bit": optim.LARS8bit,
}


def shards(shapes: Sequence[tuple[int, ...]], dim: int = 0) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    return [distribute_tensor(torch.randn(shape) * 0.02, mesh, [Shard(dim)], src_data_rank=None) for shape in shapes]


def stepper(make: Callable[..., torch.optim.Optimizer], tensors: list[Any]) -> Callable[[], Any]:
    params: list[Any] = [torch.nn.Parameter(x) for x in tensors]
    for p in params:
        own = local(p.detach()) * 1e-2
        spec = getattr(p, "_spec", None)  # fully_shard's gradients have their parameter's
        p.grad = own if spec is None else type(p)(own, spec, requires_grad=False)
    return make(params).step


def timed(call: Callable[[], object]) -> float:
    start = time.process_time()  # the machine is shared
    call()
    return time.process_time() - start


def results(size: int, rounds: int) -> Iterator[dict[str, str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    whole = shards(gpt2_shapes(size))
    cases = [(name, make, whole) for name, make in OPTIMIZERS.items()]
    cases.append(("AdamW8bit, columns that end inside blocks", optim.AdamW8bit, shards([(1024, 1000)], dim=1)))
    for name, make, sharded in cases:
        parts = [x.to_local().clone() for x in sharded]
        count = sum(x.numel() for x in parts)
        calls = {"plain": stepper(make, [x.clone() for x in parts]), "sharded": stepper(make, sharded)}
        for call in calls.values():
            call()
        times = take_turns(calls, timed, rounds, dict.fromkeys(calls, 1))
        plain, ours = (1e3 * statistics.median(times[key]) for key in ("plain", "sharded"))
        values = (name, str(count), f"{plain:.3f}", f"{ours:.3f}", f"{ours / plain:.3f}")
        yield study.row(machine.provenance("cpu"), COLUMNS, values)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("sharded_step", __doc__)
    parser.add_argument("--size", type=int, default=GPT2 // 2, help="parameters of the whole model")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for row in results(args.size, args.rounds):
        line = f"{row['optimizer']:<41} {row['plain_ms']:>9} ms, sharded {row['sharded_ms']:>9} ms: {row['ratio']}"
        print(line, flush=True)
        rows.append(row)
    path = args.out / "sharded-step.csv"
    report.append(path, rows, COLUMNS)
    print(path)


if __name__ == "__main__":
    main()
