"""checkpoint_blocks in a tiny model of each type of transformers: outputs and gradients do not change."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import memkern
from memkern.blocks.block_lists import block_lists
from tests.support import tiny

pytest.importorskip("transformers")
QUICK = ("bart", "gpt2", "t5", "vit", "wav2vec2", "whisper")
DROP_LAYERS = (  # some types whose models skip random layers in training (LayerDrop), and whose tiny model runs
    "audioflamingo3", "bart", "bigbird_pegasus", "biogpt", "fsmt", "led", "nllb-moe", "opt", "seamless_m4t_v2", "sew",
    "speech_to_text", "trocr", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm", "whisper", "xglm",
)  # fmt: skip
STEPS = 2
TIERS: dict[str, Any] = {**dict.fromkeys(DROP_LAYERS, pytest.mark.full), **dict.fromkeys(QUICK, ())}
TYPES = [pytest.param(kind, marks=TIERS.get(kind, pytest.mark.long)) for kind in tiny.types()]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)  # noqa: NPY002 - which transformers draws from


def outputs_and_gradients(source: Any, every: int | None) -> list[Tensor]:
    """All that a model returns, its hidden states too, and the gradients of its parameters, in each of two steps.

    every: of checkpoint_blocks; None for a model without checkpoints.
    """
    seed(0)
    model = source.build(torch.float32, empty=False)
    if every is not None:
        memkern.checkpoint_blocks(model, every=every)
    batch = source.batch(2)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            batch[name] = torch.randn(x.shape)
    batch["output_hidden_states"] = True
    if "use_cache" in source.inputs.names:
        batch["use_cache"] = False  # keys of a cache have another layout, which rounds otherwise
    tensors = []
    for step in range(STEPS):
        model.zero_grad()
        seed(step + 1)
        outputs = [x for x in tree_leaves(dict(model(**batch))) if isinstance(x, Tensor) and x.is_floating_point()]
        torch.stack([x.square().mean() for x in outputs if x.requires_grad]).sum().backward()
        tensors += [*(x.detach() for x in outputs), *(p.grad for p in model.parameters() if p.grad is not None)]
    return tensors


@pytest.mark.parametrize("kind", TYPES)
def test_outputs_hidden_states_and_gradients_are_those_of_the_plain_model(kind: str) -> None:
    try:
        source = tiny.source(kind)
        expected = outputs_and_gradients(source, None)
    except Exception:  # transformers' own, of any kind
        if kind in DROP_LAYERS:
            raise
        pytest.skip("no tiny model of this type is made and runs without checkpoints")
    assert tiny.drops_layers(source.config) or kind not in DROP_LAYERS
    if not any(True for _ in block_lists(source.build(torch.float32))):
        pytest.skip("this model has no list of like blocks")
    for every in (1, 2):
        actual = outputs_and_gradients(source, every)
        assert len(actual) == len(expected)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(actual, expected, strict=True))
