"""Runs torch's assertion about what may remain in a CUDA graph's memory pool, without a GPU, on given allocations."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch


def check_pool(live: Callable[[], set[int]]) -> None:
    """Raises as torch.compile's CUDA graphs do after a warm-up that left more in the graph's pool than its outputs.

    ``live``: gives the addresses of the allocations in the pool. There are no outputs.
    """
    from torch._inductor import cudagraph_trees

    def segments(_: object) -> list[dict[str, object]]:
        block = {"state": "active_allocated", "size": 1, "frames": []}
        return [{"address": address, "blocks": [block]} for address in live()]

    with (
        patch.object(
            torch._C,
            "_cuda_checkPoolLiveAllocations",
            lambda _device, _pool, addresses: live() == {*addresses},
            create=True,
        ),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(cudagraph_trees, "get_cudagraph_segments", segments),
    ):
        cudagraph_trees.check_memory_pool(0, (0, 1), [])
