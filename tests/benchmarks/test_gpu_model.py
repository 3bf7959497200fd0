"""benchmarks.gpu_model: shares that follow from counts and bytes."""

import pytest

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from benchmarks import gpu_model
from benchmarks.gpu_model import Card


def test_the_longer_of_two_times() -> None:
    card = Card("sm_90", multiprocessors=100, clock=1.0, bandwidth=1000)
    fits = gpu_model.ISSUED * 100 * gpu_model.LANES * 8 / card.copy  # instructions in the time of 8 bytes
    assert gpu_model.share_of_copy(card, 8, 0.5 * fits) == 1
    assert gpu_model.share_of_copy(card, 8, 2 * fits) == pytest.approx(0.5)


def test_every_kernel_has_counts_for_every_card() -> None:
    for kernel, row in gpu_model.shares().items():
        assert {*row} == {*gpu_model.CARDS}, kernel
        assert all(0 < share <= 1 for share in row.values()), kernel


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_model"])
    gpu_model.main()
    assert "AdamW bf16+8" in capsys.readouterr().out
