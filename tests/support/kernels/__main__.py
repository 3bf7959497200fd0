"""``python -m tests.support.kernels BACKEND [LIBRARY [WORDS]]`` runs the cases whose names contain WORDS on a backend.

Sanitizers need such a process of their own. LIBRARY: csrc/cuda compiled for the CPU. A case that fails raises.
"""

import sys
from pathlib import Path

from tests.support.kernels.backends import BACKENDS, compare
from tests.support.kernels.cases import CASES
from tests.support.simt import build

name, library, words = (*sys.argv[1:], "", "")[:3]
if library:
    build.load(Path(library))
for case in CASES.values():
    if words in case.name:
        compare(BACKENDS[name], case)
print("nothing found")
