"""A captured step as Python code: one routine per device, in the planned order."""
