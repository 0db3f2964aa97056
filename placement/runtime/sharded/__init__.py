"""A strategy as one program for each device: parts of tensors, calls on them, exchanges, the code of a rank."""
