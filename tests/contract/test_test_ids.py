"""The tests that there were are still there, or fixtures/vanished_tests.md says why not."""

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_none_has_vanished_without_a_reason() -> None:
    # By name, as files move: a name that stood in two files must stand in two.
    lines = (TESTS / "fixtures" / "test_ids.txt").read_text().splitlines()
    before = Counter(line.split("::")[1].split()[0] for line in lines if "::" in line)
    now = Counter(
        node.name
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    reasons = Counter(
        re.findall(r"^\| `(test_\w+)`", (TESTS / "fixtures" / "vanished_tests.md").read_text(), re.M)
    )
    vanished = before - now
    assert not vanished - reasons, "without a reason in fixtures/vanished_tests.md"
    assert not reasons - vanished, "these are there"
