"""How gradients become smaller on the wire, with error feedback: one file for each compression."""
