"""The optimizers of memkern.optim: steps, options, errors, numerics, and folders for loops, states and offload."""
