"""Strategies: how a transformed graph is laid over the devices of a cluster, and in which order a pipeline runs."""
