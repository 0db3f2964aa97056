"""A placed model in one process for each device: starting them, watching them, their passes and checkpoints."""
