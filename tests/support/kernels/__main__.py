"""``python -m tests.support.kernels BACKEND [LIBRARY [WORDS]]``: the cases whose names have these words, by a backend.

For a process of its own, as sanitizers need one. LIBRARY: csrc/cuda compiled for the CPU. Ends with 0 where nothing is
found.
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
