"""Stacks: how the ops of a step become kernels. `on_stack` is the door; the others are for looking."""

from graphs.origin import STACKS
from graphs.transforms.stacks.stack import fused, kernels_of, on_stack, stack_of

__all__ = ["STACKS", "fused", "kernels_of", "on_stack", "stack_of"]
