"""Recompute: forward ops run a second time in the backward pass, so that what they wrote need not wait for it."""

from graphs.transforms.recomputing.selecting import recompute, unmatched
from graphs.transforms.recomputing.stretches import recompute_stretches

__all__ = ["recompute", "recompute_stretches", "unmatched"]
