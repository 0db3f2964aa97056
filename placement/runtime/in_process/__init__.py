"""A placed model in one process: a thread for each device, or module by module."""
