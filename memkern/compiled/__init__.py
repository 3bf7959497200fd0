"""``memkern.compile``: torch.compile with memkern's choice of what is saved for the backward pass.

The files in the order in which a call uses them:

==================  ================================================================================================
compiling.py        ``memkern.compile``: the options; a model with a list of like blocks goes to blocks.py
inductor.py         hands Inductor the partitioner
partitioner.py      ``Partitioner._cut``: the joint graph of forward and backward pass, step by step
operations.py       which operation a node is part of, and its row in the tables
gradients.py        how large the gradient may be that comes to an operation
codable.py, rules.py  which values may be in codes (``UseChecker``, ``USE_KINDS``): the tables
budget.py           torch's min-cut, with values that may be in codes counted as these
partitioner.py      again, ``_SavedValues.encode``: codes in place of the values that the cut saves
codecs.py           codes as nodes of the graph
==================  ================================================================================================

The rest are steps of ``_cut`` that change the graph before the cut (norms.py, written.py) or after it (few_bit.py,
layouts.py, attention.py), and parts of the files above (nodes.py, peaks.py, distances.py, fused.py).
"""
