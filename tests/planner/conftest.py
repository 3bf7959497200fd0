from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers model's folder, of which a plan needs the configuration alone."""
    import transformers

    path = tmp_path_factory.mktemp("gpt2")
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 5000, "n_positions": 128}
    transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(path)
    return path
