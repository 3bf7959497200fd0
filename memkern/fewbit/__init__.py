"""Activations that save a few bits per element: levels, tables, how levels are fitted."""
