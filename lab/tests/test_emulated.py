"""The kernels passed on the emulated GPUs as they are now: `make emulate` says so in lab/results/emulated.json."""

from pathlib import Path

from lab import emulated


def test_the_emulated_gpus_ran_these_sources() -> None:
    assert emulated.recorded() == emulated.digest(), (
        f"what runs on emulated GPUs changed: run {emulated.COMMAND}, and commit lab/results/emulated.json"
    )


def test_every_pattern_names_a_source() -> None:
    for pattern in emulated.SOURCES:
        assert list(emulated.ROOT.glob(pattern)), pattern


def test_a_comment_costs_no_emulation(tmp_path: Path) -> None:
    sources = {
        "a.py": ("x = 1\ny = '#'\n", "# why\nx = 1  # what\n\ny = '#'\n", "x = 1\ny = '# '\n"),
        "a.cuh": ("int x;\nint y;\n", "// why\nint x;  // what\n\n/* more */ int y;\n", "int x;\nint z;\n"),
    }
    for name, texts in sources.items():
        found = []
        for text in texts:
            (tmp_path / name).write_text(text)
            found.append(emulated.code(tmp_path / name))
        assert found[0] == found[1] != found[2]
