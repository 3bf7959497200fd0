"""For all tests of HostOffload."""

import pytest

from memkern.optim.offload import device, host_weights


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few hundred elements have several."""
    monkeypatch.setattr(host_weights, "BUCKET_ELEMENTS", 200)
    monkeypatch.setattr(device, "BUCKET_BYTES", 400)
    monkeypatch.setattr(device, "LARGE_BYTES", 8000)
