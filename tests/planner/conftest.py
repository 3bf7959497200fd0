"""Fixtures: plans without rows of compiled blocks, unless a test asks for them, and the folder of a small GPT-2."""

from pathlib import Path
from typing import Any

import pytest

from memkern.planner import planning


@pytest.fixture(autouse=True)
def without_compiled_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out rows with ``compile``, which take seconds of a plan, unless a test asks for ``compiled_rows``."""
    if "compiled_rows" not in request.fixturenames:
        real = planning._alone

        def without_compiled(predictor: Any, rows: Any) -> Any:
            return real(predictor, {name: changes for name, changes in rows.items() if "compile" not in changes})

        monkeypatch.setattr(planning, "_alone", without_compiled)


@pytest.fixture
def compiled_rows() -> None:
    """Plans have the rows of compiled blocks, as they have for users."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers model's folder, of which a plan needs the configuration alone."""
    import transformers

    path = tmp_path_factory.mktemp("gpt2")
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 5000, "n_positions": 128}
    transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(path)
    return path
