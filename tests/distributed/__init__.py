"""Several processes: sharded parameters, checkpoints, pipelines."""
