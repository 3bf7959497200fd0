"""20 changes of one operator or constant that the tests must catch: ``python -m lab.mutations [--list] [--only N]``.

Run by hand (half an hour: eight of them compile C++). In a copy of the tree each change is made alone, the library is
compiled again where C++ changed, and the tests run that must catch it. Formulas move between files, so a snippet is
searched for in every file of its pattern and must be found exactly once; tests are named by function. ``--record``
writes the outcomes to lab/mutations/mutations.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "lab" / "mutations" / "mutations.json"
CPP, PYTHON, TRITON = "csrc/**/*", "memkern/**/*.py", "memkern/triton/**/*.py"


class Mutation(NamedTuple):
    """``old`` becomes ``new`` in the one file of the pattern ``files`` that has it.

    tests: functions that catch it; select: a ``-k`` expression that chooses among their cases.
    """

    label: str
    files: str
    old: str
    new: str
    tests: tuple[str, ...]
    select: str = ""
    interpret: bool = False  # Triton's kernels run in its interpreter


# Each test runs twice, without the change and with it, so a few cases are selected.
CASES = ("test_cases",)  # in tests/kernels
MUTATIONS = (
    # ---- C++
    Mutation(
        "Adam: the second moment takes 1 - beta1",
        CPP,
        "v = v + (F(s.one_minus_beta2) * g) * g;",
        "v = v + (F(s.one_minus_beta1) * g) * g;",
        CASES,
        "adam_step_ and few and generic",
    ),
    Mutation(
        "power codec: positive values may become 0",
        CPP,
        "min(max(floor(sqrt(x * factor) + u), F(1.0f))",
        "min(max(floor(sqrt(x * factor) + u), F(0.0f))",
        ("test_extreme_blocks", *CASES),
        "generic and (extreme or boundary)",
    ),
    Mutation(
        "clipping: 1e-5 beside the norm",
        CPP,
        "max_grad_norm / (grad_norm + 1e-6)",
        "max_grad_norm / (grad_norm + 1e-5)",
        ("test_a_clipped_step_is_one_on_smaller_gradients",),
    ),
    Mutation(
        "trust ratio: clipped from below",
        CPP,
        "if (ratio > 1.0) ratio = 1.0;",
        "if (ratio < 1.0) ratio = 1.0;",
        ("test_no_clipped_ratio_is_above_one", *CASES),
        "(LAMB or LARS or lamb_step_ or lars_step_) and generic",
    ),
    Mutation(
        "layout: rows as long as a block count as short ones",
        CPP,
        "if (cols >= block_size) {",
        "if (cols > block_size) {",
        ("test_ops_make_the_scales_of_the_layout", "test_backends_cut_alike"),
    ),
    Mutation(
        "LARS: the first step is dampened",
        CPP,
        "step == 1 ? 1.0 : 1.0 - ",
        "step == 0 ? 1.0 : 1.0 - ",
        (*CASES, "test_equals_a_loop_over_the_parameters"),
        "(LARS and dampening or lars_step_) and generic",
    ),
    Mutation(
        "activations: even derivatives are not taken of |x|",
        CPP,
        "if (table.symmetry != kPlain)",
        "if (table.symmetry == kOdd)",
        (*CASES, "test_codes_are_what_the_table_says"),
        "few_bit_encode and generic or table_says",
    ),
    Mutation(
        "fp16 results: ties round away from even",
        CPP,
        "(rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13",
        "(rest - 0x38000000 + 0x1000 + (rest >> 13 & 1)) >> 13",
        CASES,
        "few_bit_backward and generic",
    ),
    # ---- the reference
    Mutation(
        "reference Adam: a correction of 1 + beta1^t",
        PYTHON,
        "), 1.0 - power_of(beta1, step)",
        "), 1.0 + power_of(beta1, step)",
        CASES,
        "adam_step_ and few and generic",
    ),
    Mutation(
        "reference: trust ratios need one norm only",
        PYTHON,
        "torch.where((x_norm > LEAST_NORM) & (norm > 0), ratio, 1.0)",
        "torch.where((x_norm > LEAST_NORM) | (norm > 0), ratio, 1.0)",
        ("test_a_ratio_is_one_where_a_norm_is_zero",),
    ),
    Mutation(
        "reference: no code for the smallest positive values",
        PYTHON,
        ".floor().clamp(1, levels)",
        ".floor().clamp(0, levels)",
        ("test_extreme_blocks", "test_unsigned_power_rounds_down_after_u_and_never_to_zero"),
    ),
    # ---- layout, optimizers, converters
    Mutation(
        "layout: the last group of short rows has no scale",
        PYTHON,
        "(-(-rows // group),)",
        "((rows // group),)",
        ("test_backends_cut_alike", "test_ops_make_the_scales_of_the_layout"),
    ),
    Mutation(
        "optimizers: a tensor of just min_8bit_size keeps 32 bits",
        PYTHON,
        "p.numel() >= least",
        "p.numel() > least",
        ("test_min_8bit_size_moves_the_border", "test_small_and_flat_tensors_keep_fp32_states"),
    ),
    Mutation(
        "optimizers: vectors take 8-bit states like matrices",
        PYTHON,
        "MIN_1D_FACTOR if p.dim() <= 1 else 1",
        "MIN_1D_FACTOR if p.dim() < 1 else 1",
        ("test_small_and_flat_tensors_keep_fp32_states",),
    ),
    Mutation(
        "from_torch_state_dict: v is not stored as its root",
        PYTHON,
        'rooted = codec == "power" and not signed',
        'rooted = codec == "power" and signed',
        ("test_from_torch_stores_what_the_optimizer_would",),
    ),
    # ---- compress, few bits, training
    Mutation(
        "compress: the narrowest linear layer gives the width",
        PYTHON,
        "return max(widths, default=None)",
        "return min(widths, default=None)",
        ("test_the_width_that_the_structure_tells",),
    ),
    Mutation(
        "training: micro-batches are not averaged",
        PYTHON,
        "self.loss)(*batch) / config.tokens_per_step",
        "self.loss)(*batch) * config.tokens_per_step",
        ("test_micro_batches_train_as_one_batch",),
    ),
    Mutation(
        "training: the last window is never drawn",
        PYTHON,
        "torch.randint(len(self.train) - config.seq_len,",
        "torch.randint(len(self.train) + ~config.seq_len,",
        ("test_windows_reach_the_last_byte",),
    ),
    # ---- Triton
    Mutation(
        "Triton: a dynamic code's upper boundary is its own",
        TRITON,
        "tl.where(t > tl.load(midpoints + q), q + 1, q)",
        "tl.where(t >= tl.load(midpoints + q), q + 1, q)",
        CASES,
        "triton and dynamic and boundary and 1.0",
        True,
    ),
    Mutation(
        "Triton: what need not be clipped is",
        TRITON,
        "(clip >= 1.0)",
        "(clip <= 1.0)",
        CASES,
        "triton and adam_step_ and clipped",
        True,
    ),
)


# ---- finding


def find(tree: Path, mutation: Mutation) -> Path:
    """The one file that holds the snippet once."""
    sources = [path for path in tree.glob(mutation.files) if path.suffix in (".py", ".h", ".cpp", ".cuh", ".cu")]
    counts = {path: path.read_text().count(mutation.old) for path in sorted(sources)}
    counts = {path: count for path, count in counts.items() if count}
    if sum(counts.values()) != 1:
        where = ", ".join(f"{p.relative_to(tree)} ({n}x)" for p, n in counts.items()) or "nowhere"
        raise SystemExit(
            f"'{mutation.label}' must be pointed at its formula again: {mutation.old!r} is in {where}, "
            f"and should be once in {mutation.files}"
        )
    return next(iter(counts))


def selection(tree: Path, mutation: Mutation) -> list[str]:
    """pytest's arguments: the files that define the functions, and which of their cases."""
    files = set()
    for name in mutation.tests:
        defining = [p for p in (tree / "tests").rglob("*.py") if re.search(rf"^def {name}\(", p.read_text(), re.M)]
        if not defining:
            raise SystemExit(f"'{mutation.label}' must name other tests: there is no {name}")
        files |= {str(p.relative_to(tree)) for p in defining}
    names = " or ".join(mutation.tests)
    return [*sorted(files), "-k", f"({names}) and ({mutation.select})" if mutation.select else names]


# ---- running


class Tree:
    """A copy of the checkout, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        left_out = {".git", ".venv", "out", "build", "shared", "__pycache__"}
        shutil.copytree(ROOT, self.root, ignore=lambda _, names: left_out & {*names}, symlinks=True)
        self.build_log = folder / "build.log"

    def libraries(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.root.glob("memkern/**/*.so")}

    def build(self) -> None:
        # torch puts ccache before the compiler where there is one.
        env = {"MEMKERN_BUILD": "cpu", "CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1"}
        with self.build_log.open("w") as log:
            process = subprocess.run(
                [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
                cwd=self.root,
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
            )
        if process.returncode:
            errors = [line for line in self.build_log.read_text().splitlines() if "error" in line]
            raise SystemExit("the build failed:\n" + "\n".join(errors[:10]))

    def test(self, mutation: Mutation) -> tuple[str, str]:
        """pytest's outcome ('passed', 'failed' or why there is none), and its first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
        env = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        if mutation.interpret:
            env["TRITON_INTERPRET"] = "1"
        pytest = subprocess.run(
            [*command, *selection(self.root, mutation)],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
        )
        first = re.search(r"^FAILED (\S+(?: \S+)*?)(?: - .*)?$", pytest.stdout, re.M)
        if pytest.returncode == 0 and " passed" in pytest.stdout:
            return "passed", ""
        if pytest.returncode == 1 and first:
            return "failed", first[1].rsplit("/", 1)[-1]
        if pytest.returncode < 0:
            return "failed", f"signal {-pytest.returncode}"
        return f"no outcome (pytest returned {pytest.returncode})", pytest.stdout[-1500:] + pytest.stderr[-500:]


def run(tree: Tree, mutation: Mutation) -> tuple[str, str]:
    """'caught', 'survived' or why neither, and the test that caught it."""
    path = find(tree.root, mutation)
    outcome, detail = tree.test(mutation)
    if outcome != "passed":
        return f"the tests do not pass without it: {outcome}", detail
    text, libraries = path.read_text(), tree.libraries()
    compiled = mutation.files == CPP
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        if compiled:
            tree.build()
        outcome, detail = tree.test(mutation)
    finally:
        path.write_text(text)
        for library, content in libraries.items() if compiled else ():
            library.write_bytes(content)
    return {"failed": "caught", "passed": "survived"}.get(outcome, outcome), detail


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def record(outcomes: dict[str, dict[str, str]]) -> None:
    """Writes these outcomes, and of mutations that did not run the recorded ones."""
    known = (json.loads(RECORD.read_text()) if RECORD.exists() else {}) | outcomes
    merged = {mutation.label: known[mutation.label] for mutation in MUTATIONS if mutation.label in known}
    RECORD.write_text(json.dumps(merged, indent=1) + "\n")


def listed(i: int, mutation: Mutation) -> bool:
    """Prints where a mutation would be made and which tests would run; False if its snippet or tests are not found."""
    try:
        place, tests = find(ROOT, mutation).relative_to(ROOT), " ".join(selection(ROOT, mutation))
    except SystemExit as error:
        print(f"{i:2}  {error}")
        return False
    print(f"{i:2}  {mutation.label:58} {place}  {tests}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="where each would be made, and nothing else")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers from --list")
    parser.add_argument("--record", action="store_true", help=f"write outcomes to {RECORD.name}")
    args = parser.parse_args()
    chosen = [(i, m) for i, m in enumerate(MUTATIONS, 1) if not args.only or i in args.only]
    if args.list:
        were_found = [listed(i, m) for i, m in chosen]
        sys.exit(not all(were_found))
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="memkern-mutations-") as folder:
        tree = Tree(Path(folder))
        if not tree.libraries():
            print("compiling", flush=True)
            tree.build()
        for i, mutation in chosen:
            start = time.monotonic()
            print(f"{i:2} of {len(MUTATIONS)}  {mutation.label:58} ", end="", flush=True)
            outcome, detail = run(tree, mutation)
            print(f"{outcome:9} {time.monotonic() - start:4.0f} s  {detail}", flush=True)
            outcomes[mutation.label] = {"outcome": outcome, "caught by": detail, "commit": commit()}
    if args.record:
        record(outcomes)
    caught = sum(entry["outcome"] == "caught" for entry in outcomes.values())
    print(f"{caught} of {len(outcomes)} caught")
    sys.exit(caught != len(outcomes))


if __name__ == "__main__":
    main()
