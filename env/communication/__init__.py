"""Seconds of collectives on a cluster: as used, by formula, by the simulator, and at least."""
