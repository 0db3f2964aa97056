"""A strategy or placement as one program for each device: parts of tensors, calls on them, exchanges, code of ranks."""
