"""Sizing: the number of devices that a model needs, the size of its batch, and the gain of more devices."""
