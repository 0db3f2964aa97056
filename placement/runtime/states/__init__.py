"""Parameters, buffers and gradients of a rank: `StatePart`, the part that it stores, and a model with those alone."""
