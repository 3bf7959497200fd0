"""Every op at every level: a table of cases (cases.py) and of refused arguments (refused.py), and what runs kernels
(backends.py; of emulated GPUs lab/emulators/backends.py). All give the reference's bits, and change nothing of what
they refuse. A new op, layout, dtype or hard value is a line of the table.
"""
