"""Drop-in optimizers with block-wise 8-bit or 32-bit states."""

from .adam import Adam, Adam8bit, AdamW, AdamW8bit
from .lion import Lion, Lion8bit

__all__ = ["Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Lion8bit"]
