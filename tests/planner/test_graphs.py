"""Plans with compile=True: compiled blocks on fake tensors have the bytes of real ones, and leave no state in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memkern
from memkern import Techniques, memory
from memkern.planner import fake_cuda, fake_step, graphs
from memkern.planner.models import resolve
from memkern.planner.planning import plan
from memkern.techniques.options import WAYS_OF_SAVING
from tests.support.helpers import first_full
from tests.support.planned_models import Block

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(Block() for _ in range(3))))


COMPILED = [name for name, way in WAYS_OF_SAVING.items() if way.get("compile")]
BATCH = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
CASES: list[dict[str, Any]] = [
    {},
    {"saved_bits": "exact"},
    {"saved_bits": 8},
    {"activation_bits": 2},
    {"checkpointing": "blocks", "saved_bits": 8},
    {"precision": "bf16-mixed"},
]


def trace(**techniques: Any) -> Any:
    source = resolve(model(), None, BATCH, lambda m, batch: m(*batch).square().mean(), None)
    return fake_step.trace(source, Techniques(compile=True, micro_batch=128, **techniques), "cpu")


@pytest.mark.full
@pytest.mark.parametrize("techniques", first_full(CASES, 4), ids=str)
def test_a_trace_has_the_bytes_of_a_compiled_model_and_leaves_nothing(techniques: dict[str, Any]) -> None:
    traced = trace(**techniques)
    real, plain = model(), model()
    memkern.apply(real, Techniques(compile=True, **techniques))
    losses = []

    def forward(module: nn.Module) -> None:
        with memkern.techniques.applying.autocast(Techniques(compile=True, **techniques), "cpu"):
            losses.append(module(BATCH).square().mean())

    saved = memory.saved_bytes(lambda: forward(real), real, BATCH)
    assert abs(traced.saved - saved) <= 64  # the loss, and what else an operator of one element leaves
    forward(plain)
    # bf16 rounds single values by 2^-9; had the graph without kernels been left, the output would be what memory held
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-3 if "precision" in techniques else 1e-5)
    losses[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in real.parameters())


@pytest.mark.full
def test_equal_graphs_are_made_once_in_a_session() -> None:
    limit = torch._dynamo.config.recompile_limit
    with graphs.session():
        first = trace(saved_bits=8)
        graph_count = counters["stats"]["unique_graphs"]
        assert trace(saved_bits=8).saved == first.saved
        assert counters["stats"]["unique_graphs"] == graph_count == 1
        with pytest.raises(ZeroDivisionError), graphs.session():
            raise ZeroDivisionError
        trace(saved_bits="exact")
    assert counters["stats"]["unique_graphs"] == 2
    assert not graphs._Session.entered
    assert not graphs._Session.codes
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.full
def test_blocks_of_torchs_own_classes_are_compiled_anew_after_a_plan() -> None:
    """torch.compile compiles one function for all of them, not their forward methods."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)]
        return nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 64))

    x = torch.randn(128, 64)
    techniques = Techniques(compile=True, saved_bits=8)
    planned = plan(
        model(), inputs=x, loss=lambda model, batch: model(*batch).square().mean(), memory="1GiB", device="cpu",
        techniques={"compile": True, "saved_bits": 8},
    )  # fmt: skip
    assert "saved_bits=8, compile=True)" in planned.code()
    counters.clear()
    compiled, plain = model(), model()
    memkern.apply(compiled, techniques)
    for module in (compiled, plain):
        module(x).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 2  # the input of the first block needs no gradient
    for p, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert (p.grad - expected.grad).norm() < 0.03 * expected.grad.norm()


@pytest.mark.full
@pytest.mark.usefixtures("compiled_rows")
@pytest.mark.parametrize("device", first_full(["cuda", "cpu"]))
def test_compiled_blocks_are_compared_by_default(device: str) -> None:
    """The model has rotary embeddings, whose backward pass fills slices: torch folds such constants on the device."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100}
    config = transformers.Qwen3Config(hidden_size=64, intermediate_size=128, head_dim=32, **sizes)
    planned = plan(config, memory="2GiB", seq_len=256, device=device)
    assert planned.counted_on == device or fake_cuda.why_not()
    assert not planned.ruled_out
    saved = {name: planned.alone[name].categories["saved activations"] for name in ("as it is", *COMPILED)}
    assert saved["compiled, saved in 8 bits"] < saved["compiled, saved once (exact)"] < saved["as it is"]
    seconds = {name: planned.alone[name].seconds for name in saved}
    assert seconds["compiled, saved once (exact)"] < seconds["compiled, saved in 8 bits"]
    assert seconds["compiled, saved once (exact)"] < seconds["as it is"]
    assert planned.recommended is not None
    assert not planned.recommended.techniques.compile
    if device == "cpu":
        without = plan(config, memory="2GiB", seq_len=256, device=device, techniques={"compile": False})
        assert {*planned.alone} - {*without.alone} == {*COMPILED}


@pytest.mark.long  # a graph for each size that is tried
@pytest.mark.usefixtures("compiled_rows")
def test_what_compiled_blocks_save_is_chosen() -> None:
    """With 2 GiB compiled blocks save all; with 1 MiB less than that plan's peak, the plan sets saved_bits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=6, n_head=2, n_embd=64, n_positions=256, vocab_size=100)
    fixed = {"compile": True, "precision": "fp32", "loss_chunk": None, "state_bits": 32, "accumulation": 1}
    chosen = []
    for size in ("2GiB", None):
        limit = size or math.ceil(chosen[0].peak - 2**20)
        planned = plan(config, memory=limit, seq_len=256, device="cpu", batch_size=8, techniques=fixed)
        assert planned.recommended is not None
        chosen.append(planned.recommended)
    assert all(p.techniques.compile for p in chosen)
    assert chosen[0].seconds < chosen[1].seconds
    assert (chosen[0].techniques.saved_bits, chosen[0].techniques.checkpointing) == (None, None)
    assert chosen[1].techniques.saved_bits is not None
