"""How do agents search over strategies? The environment ``placement/Strategy-v0``."""
