"""Training with weights on the host has the bits of training with weights on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from memkern.techniques.options import Techniques
from tests.stream.runs import assert_equal, model_for, optimizer_for, states, train, weights
from tests.support.helpers import first_full
from tests.support.ranks import Ranks

BF16: dict[str, Any] = {"precision": "bf16", "state_bits": 8, "master_weights": "bf16+8"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "step in backward": {"step_in_backward": True},
    "accumulation": {"accumulation": 3},
    "checkpoints": {"checkpointing": "blocks"},
    "checkpoints in codes": {"checkpointing": "blocks", "checkpoint_bits": 8},
    "few bits": {"activation_bits": 3},
    "fp32": {"precision": "fp32", "master_weights": None},
    "shares": {"linear_share": 0.5},
}
QUICK = {("adamw", "plain"), ("adamw", "step in backward"), ("muon", "accumulation"), ("lamb", "step in backward")}
FEWER = ("step in backward", "accumulation")  # the variants of optimizers other than AdamW
CASES = [
    pytest.param(name, variant, marks=() if (name, variant) in QUICK else pytest.mark.full)
    for name, variants in {"adamw": VARIANTS, "lion": FEWER, "lamb": FEWER, "muon": FEWER}.items()
    for variant in variants
]


def run(
    techniques: Techniques, tied: bool = False, torchs_clip: float = torch.inf, **options: Any
) -> tuple[list[float], dict[str, Any], Any]:
    """The losses, weights and optimizer states of four steps. torchs_clip: the norm to which torch clips gradients."""
    model = model_for(techniques, tied)
    optimizer = optimizer_for(model, techniques, **options)
    torch.manual_seed(1)

    def clip() -> None:
        if torchs_clip < torch.inf:
            nn.utils.clip_grad_norm_(model.parameters(), torchs_clip)

    losses = train(model, optimizer, techniques, range(4), clip)
    return losses, weights(model), states(model, optimizer)


def assert_streamed_is_plain(techniques: Techniques, **options: Any) -> None:
    losses, final_weights, final_states = run(techniques.replace(weights_on_host="layers"), **options)
    plain_losses, plain_weights, plain_states = run(techniques, **options)
    assert losses == plain_losses
    assert_equal(final_weights, plain_weights)
    assert_equal(final_states, plain_states)


@pytest.mark.feature("torch", "`weights_on_host` (`fully_shard` with CPUOffloadPolicy) on one process")
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_one_process_has_the_bits_of_training_on_the_device(name: str, variant: str) -> None:
    assert_streamed_is_plain(Techniques(optimizer=name, **BF16 | VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["step in backward", pytest.param("accumulation", marks=pytest.mark.full)])
def test_tied_weights_have_the_bits_of_training_on_the_device(variant: str) -> None:
    assert_streamed_is_plain(Techniques(optimizer="adamw", **BF16 | VARIANTS[variant]), tied=True)


@pytest.mark.parametrize("name", ["adamw", pytest.param("lamb", marks=pytest.mark.full)])
def test_clipping_in_the_step_has_the_bits_of_training_on_the_device(name: str) -> None:
    techniques = Techniques(optimizer=name, **BF16, accumulation=2)
    assert_streamed_is_plain(techniques, max_grad_norm=0.05)


def test_clipping_by_torch_has_the_bits_of_training_on_the_device() -> None:
    assert_streamed_is_plain(Techniques(**BF16, accumulation=2), torchs_clip=0.05)


# ---- two processes


def streamed_and_sharded(techniques: Techniques, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's weights after training with weights on the host, and with fully_shard on the device."""
    rank = torch.distributed.get_rank()

    def trained(t: Techniques) -> tuple[list[float], dict[str, Any]]:
        model: Any = model_for(t)
        if t.weights_on_host is None:
            for module in (model.embedding, *model.blocks, model.head):
                fully_shard(module)
            fully_shard(model)
        optimizer = optimizer_for(model, t, **options)
        torch.manual_seed(1)
        losses = train(model, optimizer, t, range(4), world=2, rank=rank)
        return losses, weights(model)

    losses, streamed = trained(techniques.replace(weights_on_host="layers"))
    expected, plain = trained(techniques)
    assert losses == expected
    return streamed, plain


@pytest.mark.feature("torch", "`weights_on_host` on two processes")
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "variant"),
    first_full(
        [
            ("adamw", "step in backward"),
            ("lion", "clipping"),
            ("muon", "checkpoints in codes"),
            ("adamw", "accumulation"),
            ("lamb", "checkpoints"),
            ("adamw", "plain"),
            ("lamb", "step in backward"),
            ("muon", "step in backward"),
        ],
        full=3,
    ),
)
def test_two_processes_have_the_bits_of_fully_shard(ranks: Ranks, name: str, variant: str) -> None:
    is_clipped = variant == "clipping"  # an option of the optimizer, not a technique
    options = {"max_grad_norm": 0.05} if is_clipped else {}
    techniques = Techniques(optimizer=name, **BF16 | ({} if is_clipped else VARIANTS[variant]))
    for streamed, plain in ranks(2, streamed_and_sharded, techniques, options):
        assert_equal(streamed, plain)
