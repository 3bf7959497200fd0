"""Studies behind single figures of docs/: each is run by hand, `python -m lab.studies.<name>`.

lab/README.md says which page has which study's figures.
"""
