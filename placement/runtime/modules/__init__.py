"""Modules that `placement.apply` returns: `StrategyModule` and `PlacedRanks` on ranks, `PlacedModule` on threads."""
