"""memkern.plan: what it recommends, and what it says where nothing fits."""

import dataclasses
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.options import Techniques
from memkern.planner import built_in, fake_cuda, fake_step
from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import Predictor
from tests.support.helpers import first_full
from tests.support.planned_models import WIDTH, Block, Stack, predictor_of

# ---- the choice


@pytest.mark.full
def test_what_is_recommended_fits_and_is_the_fastest_found() -> None:
    model, x = Stack(), torch.zeros(2, WIDTH)
    predictor = predictor_of(model, x)
    plain = predictor.predict(Techniques()).peak
    given = {"precision": "fp32", "state_bits": 32}
    roomy = memkern.plan(model, memory=2 * plain, inputs=x, device="cpu", techniques=given)
    assert roomy.recommended is not None
    assert roomy.recommended.techniques == Techniques()
    tight = memkern.plan(model, memory=roomy.least, inputs=x, device="cpu")
    assert tight.recommended is not None
    assert tight.recommended.peak * (1 + tight.band[0]) <= tight.memory
    assert not memkern.plan(model, memory=int(roomy.least / 1.005), inputs=x, device="cpu").fits
    none = memkern.plan(model, memory=DEFAULTS["cpu"].process, inputs=x, device="cpu")
    assert not none.fits
    assert f"the least that could is {none.least / 2**30 + 0.005:.2f} GiB" in str(none)


@pytest.mark.full
def test_the_largest_micro_batch_is_the_largest() -> None:
    model, x = Stack(), torch.zeros(2, WIDTH)
    plan = memkern.plan(model, memory="594MiB", inputs=x, device="cpu", techniques=Techniques())
    predictor = predictor_of(model, x)
    limit = plan.memory / (1 + plan.band[0])
    assert predictor.predict(Techniques(micro_batch=plan.largest_micro_batch)).peak <= limit
    assert predictor.predict(Techniques(micro_batch=plan.largest_micro_batch + 1)).peak > limit


@pytest.mark.full
def test_batches_are_cut_into_the_largest_micro_batches_that_divide_them() -> None:
    given = {
        "precision": "fp32",
        "state_bits": 32,
        "activation_bits": None,
        "saved_bits": None,
        "checkpointing": None,
    }
    plan = memkern.plan(
        Stack(),
        memory="594MiB",
        inputs=torch.zeros(2, WIDTH),
        device="cpu",
        techniques=given,
        batch_size=4000,
        clip=1.0,
    )
    assert plan.recommended is not None
    found = plan.recommended.techniques
    assert found.accumulation > 1
    assert found.micro_batch * found.accumulation == 4000
    assert found.micro_batch <= plan.largest_micro_batch
    assert not found.step_in_backward


def test_what_is_given_is_used() -> None:
    plan = memkern.plan(
        Stack(),
        memory="4GiB",
        inputs=torch.zeros(2, WIDTH),
        device="cpu",
        techniques={"state_bits": 8, "precision": "bf16-mixed"},
    )
    assert plan.recommended is not None
    assert (plan.recommended.techniques.state_bits, plan.recommended.techniques.precision) == (
        8,
        "bf16-mixed",
    )


def test_a_model_is_left_as_it_is() -> None:
    model = Stack()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memkern.plan(model, memory="4GiB", inputs=torch.zeros(2, WIDTH), device="cpu")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {type(m) for m in model.modules()} == {Stack, Block, nn.ModuleList, nn.Linear, nn.GELU}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    first_full(
        [
            {"activation_bits": 3, "checkpointing": "blocks", "checkpoint_every": 2},
            {"step_in_backward": True, "loss_chunk": 512, "linear_share": 0.5},
            {"offload": True, "precision": "bf16", "master_weights": "bf16+8", "state_bits": 8},
            {"precision": "fp16-mixed", "accumulation": 2, "optimizer": "torch-adamw"},
            {},
            {"precision": "bf16-mixed", "accumulation": 2},
            {"offload": True, "precision": "bf16", "optimizer": "lion"},
            {"optimizer": "muon", "state_bits": 8, "step_in_backward": True},
            {"offload": True, "optimizer": "torch-adamw"},
        ],
        4,
    ),
    ids=str,
)
def test_the_lines_of_code_run(folder: Path, changes: dict[str, Any]) -> None:
    import transformers

    plan = memkern.plan(folder, memory="4GiB", seq_len=32, device="cpu", techniques=Techniques(**changes), dropout=0)
    ids = torch.arange(32)[None]
    config = transformers.AutoConfig.from_pretrained(folder)
    names = {
        "model": transformers.GPT2LMHeadModel(config),
        "batches": itertools.repeat({"input_ids": ids, "labels": ids}),
        "lr": 1e-3,
        "steps": 3,
    }
    before = names["model"](ids, labels=ids).loss
    exec(plan.code(), names)
    assert names["model"](ids, labels=ids).loss < before


# ---- built-in models and GPUs


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "bert-base", "roberta-base", "vit-base", "llama-3.2-1b"])
def test_built_in_models(name: str) -> None:
    counts = {
        "gpt2": 124.4,
        "bert-base": 109.5,
        "roberta-base": 124.6,
        "vit-base": 85.8,
        "llama-3.2-1b": 1235.8,
    }
    assert name in built_in.MODELS
    predictor = Predictor(resolve(name, 64, None, None, None), "cpu", "cpu", DEFAULTS["cpu"])
    assert predictor.fixed(Techniques()).count / 1e6 == pytest.approx(counts[name], abs=0.2)
    plain, checkpointed = (predictor.predict(Techniques(checkpointing=how)).phases for how in (None, "blocks"))
    assert checkpointed["forward"] < plain["forward"]


def test_the_text_of_a_small_model_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(8, 256)
    plan = memkern.plan(model, memory="1GiB", inputs=x, device="cpu")
    text = str(plan)
    assert "Sequential: 525,568 parameters, cpu; limit 1024.0 MiB" in text  # no tokens
    assert "peak of a step in MiB, one example;" in text
    weights = next(line for line in text.splitlines() if line.startswith("as it is")).split()[5]
    assert weights == "2.0"  # 525,568 of 4 bytes, which are 0.00 GiB
    assert "Fits as it is: plain training needs no more than the limit.\nThe fastest that fits: " in text
    assert "! may need more" not in text
    half = plan.recommended.techniques.precision == "bf16"
    names = {
        "model": model,
        "batches": itertools.repeat((x.bfloat16() if half else x,)),
        "target": x,
        "lr": 1e-3,
    }
    exec(plan.code(), names | {"steps": 2, "loss_fn": lambda y, t: nn.functional.mse_loss(y.float(), t)})


@pytest.mark.full
def test_what_may_need_more_than_the_limit_is_marked_with_a_legend() -> None:
    x = torch.randn(2, WIDTH)
    peak = memkern.plan(Stack(), memory="1GiB", inputs=x, device="cpu").alone["as it is"].peak
    plan = memkern.plan(Stack(), memory=peak, inputs=x, device="cpu")  # which may be more, by a hundredth
    text = str(plan)
    assert "! may need more than the limit" in text
    assert re.search(r"^as it is +[\d.]+!", text, re.MULTILINE)
    assert not plan.fits_as_it_is
    assert "Fits as it is" not in text


@pytest.mark.full
def test_fake_cuda(folder: Path) -> None:
    plan = memkern.plan(folder, memory="2GiB", seq_len=64)
    assert plan.counted_on == "cuda"
    assert "offload" in plan.alone
    assert dataclasses.asdict(plan)["device"] == "cuda"


def operators_of_silu() -> list[str]:
    """Call with fake CUDA."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Mish())
    source = resolve(model, None, torch.zeros(2, WIDTH), None, None)
    return [str(operator) for operator, *_ in fake_step.trace(source, Techniques(), "cuda").operators]


@pytest.mark.full
def test_an_operator_of_a_gpu_is_not_several() -> None:
    """torch without CUDA decomposes those of which it has kernels for the CPU alone, and three tensors more."""
    found = fake_cuda.call(pickle.dumps((operators_of_silu, {})))
    assert {"aten.silu_backward.default", "aten.mish_backward.default"} <= {*found}
    assert "aten.sigmoid.default" not in found


# ---- where nothing fits


def deep() -> nn.Sequential:
    """A model whose activations take more than its weights."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))


@pytest.mark.full
def test_what_would_fit_is_named_with_its_bytes_and_fits() -> None:
    given = {"accumulation": 1, "micro_batch": 4096, "precision": "fp32"}
    common = {"inputs": torch.zeros(2, 64), "device": "cpu", "clip": 1.0}
    plain = memkern.plan(deep(), memory=1, techniques=given, batch_size=4096, **common)
    least = {c.name: c for c in plain.changes}
    assert {"batch_size", "precision", "all of these"} <= {*least}
    assert least["all of these"].memory < least["batch_size"].memory < plain.least
    made = memkern.plan(deep(), memory=least["batch_size"].memory, techniques=given, batch_size=4096, **common)
    assert not made.fits
    assert ("batch_size", 1) in [(c.name, c.value) for c in made.changes]
    assert all(c.memory <= made.memory for c in made.changes)
    assert re.search(r"What would fit, each by itself: .*--batch-size 1 \(\d\.\d\d GiB\)", str(made))
    smaller = {**given, "micro_batch": 1}
    assert memkern.plan(deep(), memory=made.memory, techniques=smaller, batch_size=1, **common).fits
    assert "Not enough by themselves: " in str(plain)
    assert "All of these together do not fit either: " in str(plain)


@pytest.mark.full
def test_shorter_sequences_that_would_fit(folder: Path) -> None:
    given = {"accumulation": 1, "micro_batch": 64, "checkpointing": None}
    arguments = {"device": "cpu", "batch_size": 64}
    nothing = memkern.plan(str(folder), memory=1, seq_len=128, techniques=given, **arguments)
    [shorter] = [c for c in nothing.changes if c.name == "seq_len"]
    assert shorter.value == 64
    made = memkern.plan(str(folder), memory=shorter.memory, seq_len=128, techniques=given, **arguments)
    assert not made.fits
    assert ("seq_len", 64) in [(c.name, c.value) for c in made.changes]
    assert memkern.plan(str(folder), memory=shorter.memory, seq_len=64, techniques=given, **arguments).fits
