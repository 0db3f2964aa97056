"""Lower bounds on what any placement can reach, and proofs that none fits."""
