"""How far it is from optimizer.step() to the kernels: few functions, and short ones."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.support.helpers import needs_cpp

PACKAGE = Path(memkern.__file__).parent
# memkern's functions on the way to the op. docs/design.md goes on with those of C++: step_op, adam_step_cpu,
# step_in_one_pass, run_jobs, run_stealing, adam_run, for_batches, encode_block, SignedWriter::write and
# SignedEstimator::encode.
HOPS = ["step", "run", "_run", "step_"]


def calls_of(function: Callable[[], Any]) -> tuple[list[list[str]], set[str]]:
    """memkern's functions on the stack at each call of an op of memkern's, and all of them that ran."""
    stacks: list[list[str]] = []
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code.co_name.startswith("<"):
            return  # a comprehension, which is a function until Python 3.11 alone
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            ran.add(frame.f_code.co_name)
        elif frame.f_code.co_name == "__call__" and "memkern" in str(getattr(frame.f_locals.get("self"), "_name", "")):
            stack: list[str] = []
            at: FrameType | None = frame
            while at is not None:
                if Path(at.f_code.co_filename).is_relative_to(PACKAGE):
                    stack.insert(0, at.f_code.co_name)
                at = at.f_back
            stacks.append(stack)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return stacks, ran


@needs_cpp
@pytest.mark.parametrize("name", ["AdamW8bit", "LAMB8bit", "LARS8bit", "Lion8bit"])
def test_four_functions_of_python_stand_before_the_op(name: str) -> None:
    params = [torch.nn.Parameter(torch.randn(64, 128)) for _ in range(3)]
    optimizer = getattr(optim, name)(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    stacks, ran = calls_of(optimizer.step)
    assert stacks == [HOPS]
    assert len(ran) <= 24, ran  # those that follow groups, gather arguments and choose the backend included


def test_functions_on_the_way_are_short() -> None:
    for name in ("optim/base.py", "optim/plan.py", "_ops.py", "schemas.py", "backend.py"):
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{name}: {node.name}"
