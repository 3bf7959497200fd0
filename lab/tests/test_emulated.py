"""The kernels passed on the emulated GPUs as they are now: `make emulate` says so in lab/results/emulated.json."""

from lab import emulated


def test_the_emulated_gpus_ran_these_sources() -> None:
    assert emulated.recorded() == emulated.digest(), (
        f"what runs on emulated GPUs changed: run {emulated.COMMAND}, and commit lab/results/emulated.json"
    )


def test_every_pattern_names_a_source() -> None:
    for pattern in emulated.SOURCES:
        assert list(emulated.ROOT.glob(pattern)), pattern
