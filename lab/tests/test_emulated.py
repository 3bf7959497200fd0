"""lab/results/emulated.json has the hash of the present sources: they passed `make emulate`."""

from pathlib import Path

from lab import emulated


def test_the_emulated_gpus_ran_these_sources() -> None:
    assert emulated.recorded() == emulated.digest(), (
        f"what runs on emulated GPUs changed: run {emulated.COMMAND}, and commit lab/results/emulated.json"
    )


def test_every_pattern_names_a_source() -> None:
    for pattern in emulated.SOURCES:
        assert list(emulated.ROOT.glob(pattern)), pattern


def test_a_comment_does_not_change_the_hash(tmp_path: Path) -> None:
    sources = {  # a source, with comments, with other code
        "a.py": ("x = 1\ny = '#'\n", "# why\nx = 1  # what\n\ny = '#'\n", "x = 1\ny = '# '\n"),
        "a.cuh": ("int x;\nint y;\n", "// why\nint x;  // what\n\n/* more */ int y;\n", "int x;\nint z;\n"),
    }
    for name, texts in sources.items():
        hashed = []
        for text in texts:
            (tmp_path / name).write_text(text)
            hashed.append(emulated.code(tmp_path / name))
        assert hashed[0] == hashed[1] != hashed[2]
