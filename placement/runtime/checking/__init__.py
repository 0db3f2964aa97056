"""Checks before a strategy is advised: it can be carried out, and its parts compute the same as the whole."""
