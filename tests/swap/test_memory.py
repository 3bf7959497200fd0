"""memkern.compress: bytes saved for the backward pass."""

from __future__ import annotations

import pytest
import torch

import memkern
from memkern import memory
from tests.support import gpt2


@pytest.mark.parametrize("width", [768, 1600])
def test_gpt2_block(width: int) -> None:
    """28 tensors of the width become 12, and 3 bits for each of 4 widths."""
    block = gpt2.Block(width)
    x = torch.randn(1, 64, width, requires_grad=True)
    per_token = lambda: memory.saved_bytes(lambda: block(x)) / 64  # noqa: E731
    statistics = 2 * 8 + 4 * width // 64  # of two layer norms, and the attention's log-sums
    assert per_token() == 28 * 4 * width + statistics
    report = memkern.compress(block)
    assert per_token() == 12 * 4 * width + 4 * width * 3 / 8 + statistics
    assert report.bytes_per_token == (16 - 3 / 8) * 4 * width
    if width == 768:
        assert per_token() <= 38_500
    memkern.restore(block)
    assert per_token() == 28 * 4 * width + statistics


def test_gpt2_block_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2", reason="needs transformers")
    options = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_implementation": "sdpa"}
    block = modeling.GPT2Block(modeling.GPT2Config(n_embd=768, n_head=12, **options), layer_idx=0)
    x = torch.randn(1, 200, 768, requires_grad=True)
    per_token = lambda: memory.saved_bytes(lambda: block(x)) / 200  # noqa: E731
    assert 85_500 < per_token() < 86_500
    memkern.compress(block)
    assert per_token() <= 38_500
    memkern.compress(block, linear=0.2)
    assert per_token() <= 24_200
    assert memkern.restore(block) == 5
