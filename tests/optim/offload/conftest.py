"""For all tests of HostOffload."""

import pytest

from memkern.optim.offload import host_weights


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few hundred elements have several."""
    monkeypatch.setattr(host_weights, "BUCKET_ELEMENTS", 200)
