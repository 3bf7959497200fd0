"""What a compiled model saves for its backward pass (``memkern.compile``)."""
