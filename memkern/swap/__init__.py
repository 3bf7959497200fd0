"""Swaps a model's modules for those that save less for the backward pass (``memkern.compress``, ``memkern.restore``).

The package is not called ``compress``: importing it would put the package in the place of the function of that name.
"""
