"""Calibrating: rates of kernels and collectives, measured here or read from files, made into a cluster."""
