"""Compares memkern.plan's predictions for shards of fully_shard with real steps of gloo processes on the CPU.

Each block is sharded, then the model (FSDP2). The bytes are measured on rank 0, which has the largest shards: its
shards and states, plus the most that torch's CPU allocator adds to them in the third step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from lab.studies import study
from memkern.techniques.options import Techniques

MIB = 2**20


class Case(NamedTuple):
    kind: str  # the model's type in transformers
    devices: int  # the number of devices over which the model is sharded
    seq_len: int  # tokens of a sequence
    techniques: dict[str, Any]  # arguments of Techniques
    replicas: int = 1  # the number of copies of the sharded model (HSDP)

    @property
    def processes(self) -> int:
        return self.devices * self.replicas


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_embd": 256, "n_head": 4, "vocab_size": 4000},
    "llama": {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 704, "vocab_size": 4000},
    "mixtral": {"num_hidden_layers": 12, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 256, "num_local_experts": 4, "vocab_size": 4000},
    "bert": {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
}  # fmt: skip
FRUGAL = {"precision": "bf16", "master_weights": "bf16+8", "state_bits": 8}
CASES = (
    Case("gpt2", 2, 256, {"micro_batch": 4}),
    Case("gpt2", 4, 256, {"micro_batch": 4}),
    Case("gpt2", 2, 256, {"checkpointing": "blocks", "micro_batch": 8}),
    Case("gpt2", 2, 256, {"state_bits": 8, "activation_bits": 3, "micro_batch": 8}),
    Case("gpt2", 2, 256, {"micro_batch": 4}, 2),
    Case("llama", 2, 256, FRUGAL | {"micro_batch": 4}),
    Case("llama", 3, 256, {"micro_batch": 4}),
    Case("mixtral", 2, 256, {"micro_batch": 4}),
    Case("bert", 2, 256, {"optimizer": "lion", "state_bits": 8, "micro_batch": 4}),
    Case("bert", 2, 64, {"optimizer": "lion", "state_bits": 8, "micro_batch": 1}),
    Case("bert", 2, 256, {"checkpointing": "blocks", "micro_batch": 4}),
    Case("bert", 4, 128, {"micro_batch": 2}),
)
COLUMNS = (
    *report.PROVENANCE, "transformers", "model", "devices", "replicas", "seq_len", "techniques", "predicted_mib",
    "allocated_mib", "predicted_over_allocated",
)  # fmt: skip


def source_of(case: Case) -> Any:
    import transformers

    from memkern.planner.models import resolve

    config = transformers.CONFIG_MAPPING[case.kind](**SIZES[case.kind])
    return resolve(config, case.seq_len, inputs=None, loss=None, dropout=0.0)


def predicted(case: Case) -> int:
    """The planner's peak in bytes, without the bytes that a process has before it holds a tensor."""
    from memkern.planner.hardware import DEFAULTS
    from memkern.planner.prediction import Predictor

    predictor = Predictor(source_of(case), "cpu", "cpu", DEFAULTS["cpu"], devices=case.devices)
    prediction = predictor.predict(Techniques(**case.techniques))
    return prediction.peak - prediction.categories["process and context"]


def run_rank(rank: int, case: Case, folder: str) -> None:
    """Runs in each process; rank 0 writes its bytes at the peak to a file."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks.harness import largest_temporary
    from memkern import memory
    from memkern.blocks.block_lists import block_lists
    from memkern.techniques import applying

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    shape = (case.replicas, case.devices) if case.replicas > 1 else (case.processes,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    techniques, source = Techniques(**case.techniques), source_of(case)
    torch.manual_seed(0)
    model = source.build(applying.weight_dtype(techniques), empty=False)
    blocks = [block for block_list in block_lists(model) for block in block_list]
    applying.apply(model, techniques)
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)
    optimizer = applying.make_optimizer(list(model.parameters()), techniques, lr=1e-5)
    batch = source.batch(techniques.micro_batch)

    def take_step() -> None:
        with applying.autocast(techniques, "cpu"):
            loss = source.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    take_step()
    take_step()
    peak = largest_temporary(take_step, "cpu")
    local = [getattr(x, "_local_tensor", x) for x in (*model.parameters(), *model.buffers())]
    held = memory.tensor_bytes(local) + memory.optimizer_bytes(optimizer)
    if rank == 0:
        Path(folder, "bytes").write_text(str(peak + held))
    dist.barrier()
    dist.destroy_process_group()


def measured(case: Case) -> int:
    """The bytes of rank 0 at its peak."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (case, folder), nprocs=case.processes, start_method="fork")
        return int(Path(folder, "bytes").read_text())


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("plan_shards", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for case in (CASES[n] for n in args.cases):
            assert source_of(case).inputs  # imports the model, so that the processes need not
            allocated = measured(case)  # forks, which autograd's threads would forbid; without a GPU it has none
            plan = predicted(case)
            figures = (f"{plan / MIB:.1f}", f"{allocated / MIB:.1f}", f"{plan / allocated:.4f}")
            sizes = (case.kind, str(case.devices), str(case.replicas), str(case.seq_len))
            yield study.row(provenance, COLUMNS, (*sizes, json.dumps(case.techniques), *figures))

    study.write(args.out / "plan-shards.csv", rows(), COLUMNS, shown=8)


if __name__ == "__main__":
    main()
