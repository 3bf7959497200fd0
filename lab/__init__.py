"""Studies behind single figures of docs/, runs on a GPU, emulators of GPUs, and mutations: see README.md.

lab imports memkern, benchmarks and tests.support. Nothing outside of lab imports it.
"""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
