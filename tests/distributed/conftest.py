"""Processes that all tests here share."""

from collections.abc import Iterator

import pytest

from tests.support import ranks as processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[processes.Ranks]:
    """Calls a function on several processes: ``ranks(2, function, *arguments)``."""
    yield from processes.of_session()
