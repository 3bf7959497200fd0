"""`make gpu`: builds, tests, measures and profiles on a machine with a GPU in one call. Its parts: __main__.py."""
