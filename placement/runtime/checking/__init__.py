"""Checks before a strategy is advised, by `check.check`: it can be carried out, and its parts compute as the whole."""
