"""memkern.plan: the techniques that it recommends, the code that it prints, and its text, also where nothing fits."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.optim.dtensor.shards import is_dtensor
from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import Predictor
from memkern.techniques.options import Techniques
from tests.support.helpers import first_full
from tests.support.planned_models import WIDTH, Block, Stack, predictor_of

LITTLE = "594MiB"  # 18 MiB more than the planner counts for a process on the CPU (DEFAULTS)


def plan_of_stack(memory: int, **options: Any) -> Any:
    return memkern.plan(Stack(), memory=memory, inputs=torch.zeros(2, WIDTH), device="cpu", **options)


# ---- the choice


@pytest.mark.full
def test_plain_training_is_recommended_only_where_it_fits_for_certain() -> None:
    plain = predictor_of(Stack(), torch.zeros(2, WIDTH)).predict(Techniques()).peak
    fixed = {"precision": "fp32", "state_bits": 32}  # so that plain training is the fastest
    roomy = plan_of_stack(2 * plain, techniques=fixed)
    assert roomy.recommended is not None
    assert roomy.recommended.techniques == Techniques()
    close = plan_of_stack(plain)  # the real peak may be above the predicted one, by the share band[0]
    assert "! may need more than the limit" in str(close)
    assert re.search(r"^as it is +[\d.]+!", str(close), re.MULTILINE)
    assert not close.fits_as_it_is
    assert "Fits as it is" not in str(close)


@pytest.mark.full
def test_a_plan_that_does_not_fit_names_the_least_memory_that_does() -> None:
    impossible = plan_of_stack(DEFAULTS["cpu"].process)  # the process takes all of it before it holds a tensor
    assert not impossible.fits
    gib = math.ceil(100 * impossible.least / 2**30) / 100  # rounded up to two decimals
    assert f"the least that could is {gib:.2f} GiB" in str(impossible)
    assert "Fewer or shorter sequences need less" in str(impossible)
    with_the_least = plan_of_stack(impossible.least)
    assert with_the_least.recommended is not None
    assert with_the_least.recommended.peak * (1 + with_the_least.band[0]) <= with_the_least.memory
    assert not plan_of_stack(int(impossible.least / 1.005)).fits


@pytest.mark.full
def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    model, x = Stack(), torch.zeros(2, WIDTH)
    plan = memkern.plan(model, memory=LITTLE, inputs=x, device="cpu", techniques=Techniques())
    predictor = predictor_of(model, x)
    limit = plan.memory / (1 + plan.band[0])  # the real peak may be above a prediction, by the share band[0]
    assert predictor.predict(Techniques(micro_batch=plan.largest_micro_batch)).peak <= limit
    assert predictor.predict(Techniques(micro_batch=plan.largest_micro_batch + 1)).peak > limit


@pytest.mark.full
def test_batches_are_cut_into_the_largest_micro_batches_that_divide_them() -> None:
    fixed = {"precision": "fp32", "state_bits": 32, "activation_bits": None, "checkpointing": None}
    x = torch.zeros(2, WIDTH)
    plan = memkern.plan(Stack(), memory=LITTLE, inputs=x, device="cpu", techniques=fixed, batch_size=4000, clip=1.0)
    assert plan.recommended is not None
    techniques = plan.recommended.techniques
    assert techniques.accumulation > 1
    assert techniques.micro_batch * techniques.accumulation == 4000
    assert techniques.micro_batch <= plan.largest_micro_batch
    assert not techniques.step_in_backward


def test_a_model_is_left_as_it_is() -> None:
    model = Stack()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memkern.plan(model, memory="4GiB", inputs=torch.zeros(2, WIDTH), device="cpu")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {type(m) for m in model.modules()} == {Stack, Block, nn.ModuleList, nn.Linear, nn.GELU}
    assert all(p.grad is None for p in model.parameters())


ON_HOST: dict[str, Any] = {
    "weights_on_host": "layers", "precision": "bf16", "master_weights": "bf16+8", "state_bits": 8,
    "checkpointing": "blocks", "step_in_backward": True, "loss_chunk": 512, "micro_batch": 2,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(
    "changes",
    first_full(
        [
            {"activation_bits": 3, "checkpointing": "blocks", "checkpoint_every": 2},
            {"step_in_backward": True, "loss_chunk": 512, "linear_share": 0.5},
            ON_HOST,
            {"offload": "cpu", "precision": "bf16", "master_weights": "bf16+8", "state_bits": 8},
            {"precision": "fp16-mixed", "accumulation": 2, "optimizer": "torch-adamw"},
            {},
            {"precision": "bf16-mixed", "accumulation": 2},
            {"offload": "cpu", "precision": "bf16", "optimizer": "lion"},
            {"offload": "device", "precision": "bf16", "state_bits": 8, "step_in_backward": True},
            {"optimizer": "muon", "state_bits": 8, "step_in_backward": True},
            {"offload": "cpu", "optimizer": "torch-adamw"},
            ON_HOST | {"loss_chunk": None},
        ],
        3,
    ),
    ids=str,
)
def test_the_printed_code_lowers_the_loss(folder: Path, changes: dict[str, Any]) -> None:
    import transformers

    plan = memkern.plan(folder, memory="4GiB", seq_len=32, device="cpu", techniques=Techniques(**changes), dropout=0)
    ids = torch.arange(32)[None]
    model = transformers.GPT2LMHeadModel(transformers.AutoConfig.from_pretrained(folder))
    batch = {"input_ids": ids, "labels": ids}
    before = model(**batch).loss
    names = {"model": model, "batches": itertools.repeat(batch), "lr": 1e-3, "steps": 3}
    exec(plan.code(), names)
    loss = names.get("with_loss", lambda batch: model(**batch).loss)
    assert loss(batch) < before
    assert any(map(is_dtensor, model.parameters())) == ("weights_on_host" in changes)


# ---- built-in models and GPUs


MILLIONS = {  # the number of parameters, in millions
    "gpt2": 124.4, "vit-base": 85.8, "llama-3.1-8b": 8030.3, "gpt2-xl": 1557.6, "bert-base": 109.5, "qwen3-8b": 8190.7,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), first_full(MILLIONS.items(), 3))
def test_built_in_models_have_their_numbers_of_parameters(name: str, count: float) -> None:
    predictor = Predictor(resolve(name, 64, None, None, None), "cpu", "cpu", DEFAULTS["cpu"])
    assert predictor.static_bytes(Techniques()).count / 1e6 == pytest.approx(count, abs=0.2)
    plain, checkpointed = (predictor.predict(Techniques(checkpointing=how)).phases for how in (None, "blocks"))
    assert checkpointed["forward"] < plain["forward"]


def test_the_text_of_a_small_model_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(8, 256)
    plan = memkern.plan(model, memory="1GiB", inputs=x, device="cpu")
    text = str(plan)
    assert "Sequential: 525,568 parameters, cpu; limit 1024.0 MiB" in text  # a model without tokens has none here
    assert "peak of a step in MiB, one example;" in text
    row = next(line for line in text.splitlines() if line.startswith("as it is"))
    weights = row.split()[5]  # after the three words of the name, the peak and the time
    assert weights == "2.0"  # MiB: 525,568 weights of 4 bytes
    assert "Fits as it is: plain training needs no more than the limit.\nThe fastest that fits: " in text
    assert "! may need more" not in text
    is_bf16 = plan.recommended.techniques.precision == "bf16"
    names = {"model": model, "batches": itertools.repeat((x.bfloat16() if is_bf16 else x,)), "lr": 1e-3, "steps": 2}
    exec(plan.code(), names | {"loss_fn": lambda model, batch: model(*batch).float().square().mean()})
