"""The sentence of a report, and its sizes."""

import pytest

pytest.importorskip("rich", reason="the report needs the [train] extra")

from memkern.train import History, RunResult
from memkern.train.report import size, summary


def result(optimizer: str, loss: float, held: int, saved: int = 500) -> RunResult:
    return RunResult(
        optimizer=optimizer,
        parameters=1000,
        optimizer_bytes=held,
        bytes_per_parameter=held / 1000,
        validation_loss=loss,
        saved_bytes=saved,
        median_step_seconds=0.1,
        tokens_per_second=1.0,
        history=History(),
    )


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (2.0, "Same validation loss within 0.1 %; optimizer state 25.9 % of torch-adamw's run."),
        (2.0051, "Same validation loss within 0.3 %; optimizer state 25.9 % of torch-adamw's run."),
        (1.9949, "Same validation loss within 0.3 %; optimizer state 25.9 % of torch-adamw's run."),
        (
            2.1,
            "Validation loss 5.0 % higher (2.1000 against 2.0000); optimizer state 25.9 % of torch-adamw's run.",
        ),
        (
            1.9,
            "Validation loss 5.0 % lower (1.9000 against 2.0000); optimizer state 25.9 % of torch-adamw's run.",
        ),
    ],
)
def test_the_sentence_says_what_the_losses_are(ours: float, expected: str) -> None:
    assert summary([result("torch-adamw", 2.0, 8000), result("adamw 8-bit", ours, 2072)]) == expected


def test_the_sentence_says_what_activations_keep() -> None:
    runs = [result("torch-adamw", 2.0, 8000), result("adamw 8-bit", 2.0, 2072, 320)]
    assert summary(runs) == (
        "Same validation loss within 0.1 %; optimizer state 25.9 %, saved for the backward pass 64.0 % of "
        "torch-adamw's run."
    )


def test_the_sentence_of_one_run() -> None:
    assert summary([result("adamw 8-bit", 2.0, 2072)]) == (
        "Validation loss 2.0000; optimizer state 2.07 bytes per parameter."
    )


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (999, 1000, 26_063_056, 3_100_000_000)] == [
        "999 bytes",
        "1.00 kB",
        "26.06 MB",
        "3.10 GB",
    ]
