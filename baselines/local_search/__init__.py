"""Annealing that improves on plans: of the schedule for latency, of the loads for throughput."""
