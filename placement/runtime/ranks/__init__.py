"""A placed model in one process per device."""
