"""torch's assertion on the memory pool of a CUDA graph, checked on made-up allocations without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch


def check_pool(live: Callable[[], set[int]]) -> None:
    """What torch.compile's CUDA graphs check after the warm-up: nothing is left in the graph's pool but its outputs.

    ``live``: addresses of what is allocated in the pool; there are no outputs.
    """
    from torch._inductor import cudagraph_trees

    def segments(_: object) -> list[dict[str, object]]:
        block = {"state": "active_allocated", "size": 1, "frames": []}
        return [{"address": address, "blocks": [block]} for address in live()]

    with (
        patch.object(
            torch._C,
            "_cuda_checkPoolLiveAllocations",
            lambda _device, _pool, found: live() == {*found},
            create=True,
        ),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(cudagraph_trees, "get_cudagraph_segments", segments),
    ):
        cudagraph_trees.check_memory_pool(0, (0, 1), [])
