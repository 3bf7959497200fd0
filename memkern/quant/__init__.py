"""Block-wise 8-bit quantization: the codes (``codec``), the blocks (``layout``), the functions (``blockwise``)."""
