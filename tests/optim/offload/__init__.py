"""HostOffload: optimizer states in the host's memory, stepped by the CPU or by the device."""
