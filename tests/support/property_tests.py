"""hypothesis, or stand-ins where it is missing (as on machines of `make gpu`), which skip the tests that use it."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from hypothesis import example, given, settings
    from hypothesis import strategies as st
except ImportError:

    class _Anything:
        """Stands for every strategy, and for what is made of strategies."""

        def __getattr__(self, name: str) -> _Anything:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
            return self

    def _as_it_is(*args: Any, **kwargs: Any) -> Any:
        return lambda test: test

    def given(*args: Any, **kwargs: Any) -> Any:
        return pytest.mark.skip(reason="hypothesis is not installed")

    example = settings = _as_it_is
    st = _Anything()
else:
    # The same examples in every run, so that a failure can be repeated.
    settings.register_profile("memkern", deadline=None, derandomize=True, database=None)
    settings.load_profile("memkern")

__all__ = ["example", "given", "settings", "st"]
