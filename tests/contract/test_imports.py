"""Modules of memkern: each can be imported first, and no two import each other."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import memkern

ROOT = Path(memkern.__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "memkern").rglob("*.py")
}
# What these import may not be installed.
NEEDS = {
    "memkern.triton": "triton",
    "memkern.nn.conv1d": "transformers",
    "memkern.integrations.transformers": "transformers",
    "memkern.integrations.timm": "torchvision",  # which timm asks for
}


def imports_of(name: str) -> set[str]:
    """Those inside functions and for type checkers too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= (names & {*MODULES}) or {module}
    return found & {*MODULES}


def test_no_modules_import_each_other() -> None:
    """But for ``memkern``, which has public names of its modules."""
    graph = {name: imports_of(name) - {name, "memkern"} for name in MODULES if name != "memkern"}
    assert "memkern.planner.fake_step" in graph["memkern.planner.prediction"]  # it sees what there is
    assert "memkern._ops" not in graph["memkern.backend"] | graph["memkern.schemas"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.long
def test_each_module_can_be_imported_first() -> None:
    # In forks of one process that has torch and others already: fresh processes would import them as often.
    code = """
import contextlib, importlib, os, sys
for name in ("torch", "transformers", "accelerate", "lightning", "triton", "rich", "matplotlib.pyplot"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        assert not [m for m in sys.modules if m.startswith("memkern")]
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"cannot be imported first: {failed}" if failed else 0)
"""
    import importlib.util

    missing = [prefix for prefix, needed in NEEDS.items() if importlib.util.find_spec(needed) is None]
    names = [
        name
        for name in MODULES
        if not any(name.startswith(prefix) for prefix in missing) and not name.endswith("__main__")
    ]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_memkern_adds_its_own_modules_to_torch_alone() -> None:
    code = """
import sys
import torch
before = {*sys.modules}
import memkern.optim
memkern.compress, memkern.nn, memkern.quantize_affine, memkern.memory
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
memkern.compress(model)
model(torch.randn(2, 64)).sum().backward()
print(*sorted({name.partition(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names}))
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "triton")
print(*[name for name in heavy if name in {*sys.modules} - before])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split() for line in done.stdout.splitlines()] == [["memkern"], []]


def test_the_mark_for_torchdynamo_is_the_one_that_torch_sets() -> None:
    import torch

    from memkern.tracing import assume_constant_result

    def ours() -> None: ...
    def theirs() -> None: ...

    assert vars(assume_constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
