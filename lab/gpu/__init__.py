"""`make gpu`: builds, tests, measures and profiles on a machine with a GPU, in one call; parts.py lists the parts."""
