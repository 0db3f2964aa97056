"""Exports for other tools: a placement as a device map or JSON, a strategy as a script or a configuration."""
