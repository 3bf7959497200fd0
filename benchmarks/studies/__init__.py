"""One-off studies behind single figures of docs/: each is run by hand, `python -m benchmarks.studies.<name>`.

What users run to compare speeds is in the folder above.
"""
