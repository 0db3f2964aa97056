"""Measuring: how fast this machine's devices and links, a model's ops, and whole placements are."""
