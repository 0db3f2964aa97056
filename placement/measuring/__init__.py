"""Measuring this machine: its devices and links, the ops of a model, and whole placements really run."""
