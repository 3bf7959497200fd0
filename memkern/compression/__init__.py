"""Swapping a model's modules for those that save less for the backward pass: ``memkern.compress`` and ``restore``."""
