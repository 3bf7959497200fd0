"""The version of memkern, read by setuptools (pyproject.toml) and tools/release.py."""

__version__ = "0.1.0"
