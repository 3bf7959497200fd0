"""memkern.plan of a model that several devices share. Real steps: lab/studies/plan_shards.py."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.options import OptionError, Techniques
from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import Predictor
from memkern.planner.shards import Groups
from memkern.planner.trace import Trace

WIDTH, DEPTH = 30, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def predictor(devices: int) -> Predictor:
    source = resolve(Model(), None, torch.zeros(2, WIDTH), None, None)
    return Predictor(source, "cpu", "cpu", DEFAULTS["cpu"], devices)


def test_a_device_holds_its_rows_and_what_is_gathered() -> None:
    found = predictor(4).fixed(Techniques())
    block, head = 8 * WIDTH + 8, 2 * WIDTH  # of 30 and 5 rows, rounded up
    assert found.count == DEPTH * WIDTH * (WIDTH + 1) + 5 * WIDTH
    assert found.parameters == found.gradients == 4 * (DEPTH * block + head)
    assert found.optimizer == 8 * (DEPTH * block + head) + 4 * (2 * DEPTH + 1)  # and a step counter per tensor
    assert (found.block, found.root) == (4 * 4 * block, 4 * 4 * head)


def test_what_is_gathered_in_each_part_of_a_step() -> None:
    operators: list[Any] = [("op",)] * 12
    # Two blocks of two operators, one of the loss; the loss, two blocks of two operators, the rest
    trace = Trace([], {}, operators, 6, blocks=((1, 11), (3, 9)))
    found = Groups(root=100, block=1, shard=50).beside(trace)
    forward = [100, 100, 102, 102, 102, 102, 101]
    backward = [101, 103, 103, 103, 103, 150]  # at the end, the root's part beside two copies of its gradients
    assert found == forward + backward
    assert set(Groups(100, 1).beside(Trace([], {}, operators, 6))) == {104}


def test_gradients_of_blocks_are_reduced_when_the_block_ends() -> None:
    one, many = (predictor(n).predict(Techniques(micro_batch=50)) for n in (1, 3))
    assert many.phases["step"] < one.phases["step"] / 2 + DEFAULTS["cpu"].process
    gathered = predictor(3).fixed(Techniques())
    assert many.categories["temporaries"] >= gathered.root + gathered.block


@pytest.mark.parametrize(
    ("techniques", "name"),
    [
        ({"loss_chunk": 8}, "loss_chunk"),
        ({"checkpointing": "blocks", "checkpoint_every": 2}, "checkpoint_every"),
        ({"optimizer": "muon"}, "optimizer"),
    ],
)
def test_what_is_not_counted_with_shards_is_refused(techniques: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}.* with devices above 1"):
        memkern.plan(
            Model(),
            memory="4GiB",
            inputs=torch.zeros(2, WIDTH),
            device="cpu",
            devices=2,
            techniques=techniques,
        )


def test_no_devices_are_refused() -> None:
    with pytest.raises(OptionError, match="devices: 0 given"):
        memkern.plan(Model(), memory="4GiB", inputs=torch.zeros(2, WIDTH), device="cpu", devices=0)


def test_a_plan_for_several_devices_says_so() -> None:
    plan = memkern.plan(Model(), memory="4GiB", inputs=torch.zeros(2, WIDTH), device="cpu", devices=2)
    assert plan.devices == 2
    assert "on each of 2 devices with fully_shard" in str(plan)
    assert "fully_shard(module)" in plan.code()
    assert not {"offload", "loss in chunks", "step in backward"} & plan.alone.keys()
    assert plan.recommended is not None
    assert not plan.recommended.techniques.step_in_backward


# ---- tensor parallelism


def llama(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaConfig(**common | {"num_key_value_heads": 2, "vocab_size": 256} | sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_device_holds_its_part_of_the_layers_of_a_tp_plan(tied: bool) -> None:
    source: Any = resolve(llama(tie_word_embeddings=tied), 32, None, None, None)
    whole, half = (
        Predictor(dataclasses.replace(source, tensor_parallel=n), "cpu", "cpu", DEFAULTS["cpu"]) for n in (1, 2)
    )
    norms = 5 * 64  # whole on each device
    count = whole.fixed(Techniques()).count
    assert half.fixed(Techniques()).count == norms + (count - norms) // 2
    assert half.predict(Techniques()).peak < whole.predict(Techniques()).peak


@pytest.mark.full
def test_a_plan_says_how_many_devices_share_the_layers() -> None:
    given = Techniques(state_bits=8)
    plan = memkern.plan(
        llama(), memory="4GiB", seq_len=32, device="cpu", techniques=given, tensor_parallel=2, cache=False
    )
    whole = memkern.plan(llama(), memory="4GiB", seq_len=32, device="cpu", techniques=given, cache=False)
    assert plan.parameters == whole.parameters
    assert "on each of 2 devices with tensor parallelism" in str(plan)
    assert "torchrun --nproc-per-node 2" in plan.code()


@pytest.mark.parametrize(
    ("config", "arguments", "match"),
    [
        (llama, {"tensor_parallel": 4}, "tensor_parallel: 4 given; allowed: a divisor of num_key_value_heads, 2"),
        (llama, {"devices": 2}, "tensor_parallel: 2 given; allowed: 1 with devices above 1"),
        (llama, {"techniques": {"compile": True}}, "compile: True given; allowed: False with tensor_parallel above 1"),
        (llama, {"techniques": {"linear_share": 0.5}}, "linear_share: 0.5 given; allowed: None with tensor_parallel"),
        (llama, {"techniques": {"optimizer": "muon"}}, "optimizer: 'muon' given; allowed: one whose step"),
        ("gpt2", {}, "allowed: 1, as gpt2 has no tp_plan"),
        ("MixtralConfig", {}, "allowed: 1, as mixtral has 'moe_tp_experts' for model.layers.0.mlp.experts"),
    ],
)
def test_what_is_not_counted_with_tensor_parallelism_is_refused(
    config: Any, arguments: dict[str, Any], match: str
) -> None:
    transformers = pytest.importorskip("transformers")
    if config == "MixtralConfig":
        config = transformers.MixtralConfig(num_hidden_layers=1)
    given = {"tensor_parallel": 2} | arguments
    with pytest.raises(OptionError, match=match):
        memkern.plan(config() if callable(config) else config, memory="4GiB", device="cpu", seq_len=32, **given)
