"""Replicas in real processes of this host: the same participants, each in a process of its own, over gloo."""
