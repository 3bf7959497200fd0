"""Predicts what a training step needs, by category and technique, and chooses what fits: ``memkern.plan``."""
