"""Measuring: how fast this machine's devices and links, a model's ops, and whole placements are.

`machine` measures devices and links, `models` the ops of a model on them, `runs` whole steps of a placement.
"""
