"""Random training loops with edits, saves and exports between steps (hypothesis) match a plain optimizer's."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")
from tests.support.run_loops import LONG_TEST_S, LOOPS, run, run_for
from tests.support.training_exports import ExportedLoop

ignore_other_options = pytest.mark.filterwarnings("ignore:the state_dict is of an optimizer with other options")


@pytest.mark.full
@ignore_other_options
def test_loops_are_those_of_a_plain_optimizer() -> None:
    run(ExportedLoop, 0, LOOPS // 2)


@pytest.mark.long
@ignore_other_options
def test_an_hour_of_loops() -> None:
    class Compiled(ExportedLoop):
        compilers = ("", "", "aot_eager", "inductor")

    run_for(LONG_TEST_S, Compiled)
    assert Compiled.compiled_calls > 0
