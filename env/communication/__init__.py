"""What collectives take on a cluster: by formula, by the simulator, and at least."""
