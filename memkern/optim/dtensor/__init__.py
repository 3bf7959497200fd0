"""Steps of sharded parameters: DTensors of fully_shard and of tensor parallelism.

States are DTensors with the parameter's mesh and placements. A step is one call of the op for all local tensors. The
whole tensor decides whether a state has 8 bits and where its blocks begin, so every rank computes the bits that one
process alone would. Ranks exchange only what no rank knows alone, in one collective for each mesh dimension, and in
one order of the parameters on all ranks (order.py):

- the norms of ``max_grad_norm`` and of LAMB's and LARS's layers, and a GradScaler's ``found_inf``;
- the scales of blocks that lie on several ranks. A shard ends inside a block where rows are shorter than a block (1-D
  tensors, small convolutions) and the rows of a rank are not whole blocks, or where columns are sharded and those of a
  rank are not whole blocks. The scales of such a tensor are replicated, and its step runs on the reference. LAMB and
  LARS run on the reference for shards of several layers;
- Muon's matrices, each of which goes to one rank and back (muon.py).
"""
