"""Storage of a rank: its parts of parameters, buffers and batches, saved, gathered and clipped."""
