"""``python tests/build/installed.py`` checks that the installed memkern gives the bits of tests/fixtures/hashes.json.

Called in this way, Python imports memkern from its environment and not from this tree. It prints one line of JSON:
versions, the backend of CPU tensors, how many cases have the recorded hash, and which do not. It exits with 1 where a
case does not, or where CPU tensors do not run in C++ (``--backend reference`` expects the reference).
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import sys
from pathlib import Path

import torch

import memkern
from memkern import backend

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent))  # after memkern is imported: for tests.support.optimizers
GROUPS = ("AdamW8bit", "Lion8bit", "activations", "blockwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", action="append", help=f"of hashes.json (default: {', '.join(GROUPS)})")
    parser.add_argument("--backend", default="cpu", help="the one expected for CPU tensors (default: cpu)")
    args = parser.parse_args()
    assert memkern.__file__
    assert not Path(memkern.__file__).is_relative_to(TESTS.parent / "memkern")
    torch.set_num_threads(1)
    fixtures = runpy.run_path(str(TESTS / "fixtures" / "make_hashes.py"))
    known = json.loads((TESTS / "fixtures" / "hashes.json").read_text())
    different, cases = [], 0
    for group in args.group or GROUPS:
        for name, run in fixtures["GROUPS"][group]().items():
            cases += 1
            result = run("cpu")  # a state may have more entries than it had
            if any(result.get(key) != value for key, value in known[group][name].items()):
                different.append(name)
    report, selected = backend.report(), backend.select("cpu")
    summary = {
        "file": memkern.__file__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "backend": selected,
        "reason": report["backends"]["cpu"]["reason"],
        "build_facts": "yes" if "compiler" in report["build"] else "no",
        "equal": str(cases - len(different)),
        "cases": str(cases),
        "different": different,
    }
    print(json.dumps(summary))
    raise SystemExit(bool(different) or selected != args.backend)


if __name__ == "__main__":
    main()
