"""Benchmarks: `python -m benchmarks` runs them; the docstring of each bench_<topic>.py says what is measured.

A benchmark declares cases, and a case its contenders. A contender is set up once; harness.py then measures its time and
its bytes, interleaved with the others. The results are rows of a CSV, from which every table and picture is made.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
