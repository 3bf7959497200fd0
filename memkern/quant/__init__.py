"""Quantization: block-wise 8-bit codes (codec, layout, blockwise), integers with a zero point (affine)."""
