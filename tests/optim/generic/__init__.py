"""torch's generic tests of optimizers (tests/support/generic_tests.py), collected for memkern's."""
