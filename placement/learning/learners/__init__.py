"""How policies are trained: one learner for each kind, by name."""
