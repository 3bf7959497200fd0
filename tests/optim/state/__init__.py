"""Optimizer states: saved and loaded, their format, and converters of other libraries' states."""
