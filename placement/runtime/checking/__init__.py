"""Checks before a strategy is advised, by `check.check`: its program runs on a smaller model, or ops in parts."""
