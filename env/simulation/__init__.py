"""The score: one step simulated on a cluster, loads in a steady state, memory over time (docs/score.md)."""
