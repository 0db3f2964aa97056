"""Local search, which improves plans by annealing: the schedule for latency, the loads for throughput."""
