"""Seconds of ops on a device, and their waits for the host that launches them."""
