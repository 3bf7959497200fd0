"""Changes of one operator or constant that the tests must catch: ``python -m lab.mutations``."""
