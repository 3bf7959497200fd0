"""Linear layers that save a random projection of their input."""
