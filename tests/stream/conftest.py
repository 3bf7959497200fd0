"""One process group for tests in this process; several processes for the others."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support import ranks as processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[processes.Ranks]:
    """Calls a function on several processes: ``ranks(2, function, *arguments)``."""
    yield from processes.of_session()


@pytest.fixture(autouse=True, scope="module")
def _own_process_group() -> Iterator[None]:
    """Ends what a module's tests have made: others ask whether there is a process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
