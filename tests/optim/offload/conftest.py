"""Fixture for the tests of HostOffload: buckets so small that models of a few hundred elements have several."""

import pytest

from memkern.optim.offload import device, host_weights


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 200 elements (steps on the CPU) or 400 bytes (steps on the device)."""
    monkeypatch.setattr(host_weights, "BUCKET_ELEMENTS", 200)
    monkeypatch.setattr(device, "BUCKET_BYTES", 400)
    monkeypatch.setattr(device, "LARGE_BYTES", 8000)
