"""The autograd functions: each saves less for its backward pass than torch's operations do. Public: functional.py."""
