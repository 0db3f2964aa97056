"""Exact solvers, which prove their answers: constraint programming for latency, integer programming for throughput."""
