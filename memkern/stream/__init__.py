"""Weights on the host, by block: fully_shard, its copies ahead of time, and the pinned memory."""
