"""What a rank stores of parameters, buffers and batches, and how that is saved, gathered and clipped."""
