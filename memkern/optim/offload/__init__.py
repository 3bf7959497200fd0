"""Optimizer states in the host's memory, stepped by the CPU (host.py) or brought to the device (device.py)."""
