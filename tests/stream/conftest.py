"""One process group for tests in this process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _own_process_group() -> Iterator[None]:
    """Ends what a module's tests have made: others ask whether there is a process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
