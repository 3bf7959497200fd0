"""The imports of memkern's modules have no cycle, and importing memkern imports nothing heavy beside torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import memkern

ROOT = Path(memkern.__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "memkern").rglob("*.py")
}


def imports_of(name: str) -> set[str]:
    """The modules of memkern that a module imports, inside functions and for type checkers, too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = {f"{module}.{alias.name}" for alias in node.names}
            imported |= (names & {*MODULES}) or {module}
    return imported & {*MODULES}


def test_imports_have_no_cycle() -> None:
    """``memkern`` itself, which imports its modules, is left out; only memkern.backend imports it, for its version."""
    graph = {name: imports_of(name) - {name} for name in MODULES if name != "memkern"}
    assert [name for name, imported in graph.items() if "memkern" in imported] == ["memkern.backend"]
    assert "memkern.planner.fake_step" in graph["memkern.planner.prediction"]  # a known import is found
    assert "memkern._ops" not in graph["memkern.backend"] | graph["memkern.schemas"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names a cycle's modules


def test_importing_and_using_memkern_imports_no_other_package_than_torch() -> None:
    code = """
import sys
before = {*sys.modules}
import memkern
assert memkern.__version__ and "optim" in dir(memkern)
from memkern import backend
from memkern.quant import codec
print(*{name.partition(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names})
import torch
before = {*sys.modules}
import memkern.optim
memkern.compress, memkern.nn, memkern.quantize_affine, memkern.memory
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
memkern.compress(model)
model(torch.randn(2, 64)).sum().backward()
others = {name.partition(".")[0] for name in {*sys.modules} - before}
print(*sorted(others - {"torch", *sys.stdlib_module_names}))  # torch 2.15's linear layers import parts of torch
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "triton")
print(*[name for name in heavy if name in {*sys.modules} - before])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert [line.split() for line in run.stdout.splitlines()] == [["memkern"], ["memkern"], []]
    assert not run.stderr


def test_assume_constant_result_sets_the_attributes_that_torchs_sets() -> None:
    """memkern has its own, as torch's imports TorchDynamo."""
    import torch

    from memkern.tracing import assume_constant_result

    def ours() -> None: ...
    def theirs() -> None: ...

    assert vars(assume_constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
