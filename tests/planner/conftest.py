"""Tests read no plan that another one made, and leave none in the user's folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of plans."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memkern" / "plans"
