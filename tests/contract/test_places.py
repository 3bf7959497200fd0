"""The files that name an optimizer: those that a new one adds or changes. CONTRIBUTING.md has them as a recipe."""

import ast
import re
from pathlib import Path

import pytest

from memkern.schemas import STEP_OPS, StepOp
from tests.support.optimizers import SPECS

ROOT = Path(__file__).parents[2]
OWN = (
    "memkern/reference/{}.py",  # the formula, in the order of operations of all backends
    "memkern/triton/{}.py",  # its kernels, and their launch
    "memkern/optim/{}.py",  # the class: arguments, defaults, checks
    "csrc/core/{}.h",  # the formula for one element, on CPU and CUDA
    "csrc/cpu/kernels/{}.h",  # the loop over blocks
    "csrc/cuda/{}.cu",  # the op, its kernels, and their launch
)
LINES = {
    "memkern/schemas.py": "its StepOp: moments, hyperparameters, flags",
    "memkern/reference/__init__.py": "its name",
    "memkern/triton/__init__.py": "its name",
    "memkern/optim/__init__.py": "its class",
    "csrc/cpu/steps.cpp": "the op: from its arguments to jobs",
    "csrc/cpu/kernels/jobs.h": "its job and its kernels",
    "csrc/cpu/kernels/all.h": "its header and its kernels",
}
# For `python -m memkern train --optimizer` and `plan --optimizer`.
OPTIONAL = {"memkern/options.py", "memkern/train/config.py"}
GENERATED = {"csrc/common/schemas.h", "csrc/core/hyperparameters.h"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and the names that it imports from each."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_test_is_imported() -> None:
    """What two of them share is in tests/support."""
    a_test = re.compile(r"tests\.(\w+\.)*test_\w+")
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if any(a_test.match(name) for name in imported(path))
    }
    assert not importing


def code_of(path: Path) -> str:
    """A file without comments and docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"//[^\n]*", "", text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def names(family: str) -> re.Pattern[str]:
    """lars_step_, LARS_STEP, LarsJob, kLarsStep, LARS8bit, "lars": the name as a word of an identifier."""
    title = family.title()
    return re.compile(rf"(?<![A-Za-z])({family}|{family.upper()})(?![a-z])|(?<![A-Z])k?{title}(?![a-z])")


# LARS is what nothing else builds on: Adam's and Lion's loops are those of LAMB and LARS too.
@pytest.mark.parametrize("family", ["lars"])
def test_an_optimizer_is_named_in_these_files_alone(family: str) -> None:
    named = {
        path.relative_to(ROOT).as_posix()
        for folder in ("memkern", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and names(family).search(code_of(path))
    }
    own = {pattern.format(family) for pattern in OWN}
    assert named - OPTIONAL - GENERATED == own | {*LINES}


@pytest.mark.parametrize("name", STEP_OPS)
def test_every_optimizer_has_all_of_them(name: str) -> None:
    family = name.removesuffix("_step_")
    assert family in {spec.family for spec in SPECS.values()}, "tests/support/optimizers"
    for path in (*(pattern.format(family) for pattern in OWN), *LINES):
        assert names(family).search(code_of(ROOT / path)), path


def test_no_list_of_arguments_is_repeated() -> None:
    fields = re.compile(r"hyperparameters\b[^}]{0,200}\bcodec\b[^}]{0,200}\bblock_size\b", re.S)
    listing = {
        path.relative_to(ROOT).as_posix()
        for folder in ("memkern", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and fields.search(code_of(path))
    }
    # Where they are declared in each language, and made and checked.
    assert listing - GENERATED == {
        "memkern/schemas.py",
        "csrc/common/step_args.h",
        "memkern/reference/state.py",
        "memkern/triton/step_args.py",
    }


@pytest.mark.parametrize("op", STEP_OPS.values(), ids=lambda op: op.name)
def test_scalars_are_the_members_of_the_structs(op: StepOp) -> None:
    """csrc/core/NAME.h has them in a struct, or in that of the optimizer that it derives from."""

    def members(title: str) -> list[str]:
        path = ROOT / "csrc/core" / f"{title.lower()}.h"
        text = re.sub(r"//[^\n]*", "", path.read_text())
        base, body = re.search(rf"struct {title}Scalars(?: : (\w+)Scalars)? {{(.*?)}};", text, re.S).groups()  # type: ignore[union-attr]
        own = [name for line in re.findall(r"(?:float|int32_t) ([^;]+);", body) for name in line.split(", ")]
        return [*(members(base) if base else []), *own]

    assert members(op.name.removesuffix("_step_").title()) == [*op.scalars]
