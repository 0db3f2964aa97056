"""Exports: a placement in the formats of other tools, as a device map, a pipeline or JSON."""
