"""Modules that `placement.apply` returns: `StrategyModule` on ranks, `PlacedModule` on threads, others by module."""
