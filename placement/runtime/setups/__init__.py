"""Setups: what a strategy says to the modules of one model, as constants for the torch runner."""
