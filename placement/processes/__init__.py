"""Processes: those of this host, started together, listened to and ended, and runners of independent tasks."""
