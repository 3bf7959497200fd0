"""Saves tensors for the backward pass once, computed anew or in 8-bit codes (``memkern.quantize_saved``)."""
