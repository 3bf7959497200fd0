"""weights_on_host: fully_shard keeps the weights in the host's memory, and each block's are copied ahead of time."""
