"""Where pickles of modules that were written before memkern.fewbit existed look for these."""

from .fewbit.levels import Levels, Valley

__all__ = ["Levels", "Valley"]
