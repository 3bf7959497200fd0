"""Compares the losses of memkern's optimizers and peers' at equal steps and tuned rates, on six small tasks.

tasks.py has the models and their data, contenders.py the optimizers, runs.py the method, results.py the statistics,
page.py the tables and the picture of docs/evidence.md.
"""
