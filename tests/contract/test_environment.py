"""docs/environment.md: the environment variables that the code reads, all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# os.environ["X"], os.environ.get("X"), std::getenv("X"), $X or ${X} of a shell.
READ = re.compile(r"""(?:environ(?:\.get|\.pop)?[(\[]|getenv\()["'](\w+)|\$\{?(MEMKERN_\w+)""")
# Of programs and of other packages, which memkern passes on or reads as they do.
OTHERS = {"PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "OUT", "NO_COLOR"}


def code() -> list[Path]:
    files = [ROOT / "setup.py", ROOT / "Makefile", *(ROOT / ".ci").glob("*")]
    for folder in ("memkern", "csrc", "benchmarks", "lab", "tests", "examples", "docs"):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")]
    return files


def rows() -> list[str]:
    return [line for line in (ROOT / "docs/environment.md").read_text().splitlines() if line.startswith("| `")]


def names(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row.split("|")[1]))


def test_the_table_has_every_variable_that_is_read() -> None:
    listed = {name for row in rows() for name in names(row)}
    read: set[str] = set()
    for path in code():
        text = re.sub(r"environ\[[^\]]*\] =[^=].*|#.*", "", path.read_text())  # those that are set, comments
        read |= {name for pair in READ.findall(text) for name in pair if name}
    assert {
        "MEMKERN_BACKEND",
        "MEMKERN_CPU_ISA",
        "MEMKERN_BUILD",
    } <= read  # it sees Python, C++ and the build
    of_the_emulator = {name for name in read if name.startswith("SIMT_")}  # tests/support/simt
    assert listed == read - OTHERS - of_the_emulator


def test_setup_py_lists_those_of_the_build() -> None:
    head = (ROOT / "setup.py").read_text().split('"""')[1]
    of_the_build = {name for row in rows() if "at the build" in row for name in names(row)}
    assert of_the_build - {"CXX", "NVCC"} == set(re.findall(r"^([A-Z_]{6,})  ", head, re.MULTILINE))
