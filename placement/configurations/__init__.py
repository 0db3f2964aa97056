"""Configurations of the tools that train: read as a `Configuration`, and written from one or from a result."""
