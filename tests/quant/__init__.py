"""Block-wise and affine quantization: codecs, the dither, layouts of blocks."""
