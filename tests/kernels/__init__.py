"""Every kernel of every backend against the reference, by the cases of tests/support/kernels."""
