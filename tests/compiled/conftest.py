import pytest


@pytest.fixture(autouse=True)
def _can_compile(can_compile: None) -> None:
    """All tests of this folder compile, or refuse to for another reason than torch's version."""
