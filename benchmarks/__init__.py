"""Benchmarks: `python -m benchmarks` runs them, each bench_<topic>.py says what is measured.

A benchmark declares cases, a case names its contenders, a contender sets up once and is then measured for
speed and for bytes by harness.py, in turns with the others. The results are rows of a CSV; all that is shown
comes from it.
"""
