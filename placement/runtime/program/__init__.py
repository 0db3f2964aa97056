"""A captured step as Python code: `Functional`, without writes in place, and `Routine`, the code of one device."""
