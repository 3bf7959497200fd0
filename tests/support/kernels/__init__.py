"""The tables of cases (cases.py) and of refused arguments (refused.py) of every op, and the backends that run them
(backends.py; emulated GPUs are in lab/tests). All give the reference's bits, and change nothing of arguments that they
refuse. A new op, layout, dtype or hard value is a line of a table.
"""
