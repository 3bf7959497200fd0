"""Studies behind single figures of docs/: each is run by hand, `python -m lab.studies.<name>`.

../README.md says which figure is whose.
"""
