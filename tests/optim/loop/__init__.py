"""Optimizers in training loops: what may change between steps, torch.compile, GradScaler, bf16 weights."""
