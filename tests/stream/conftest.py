"""A fixture that ends the process group that weights on the host make, after each file of tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _own_process_group() -> Iterator[None]:
    """Other tests expect a process without a process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
