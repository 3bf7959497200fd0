"""Finds a model's lists of blocks, and puts checkpoints around blocks. Compiled blocks: memkern/compiled/blocks.py."""
