"""A model's blocks: the lists of them, and checkpoints around them. Compiled blocks: memkern/compiled/blocks.py."""
