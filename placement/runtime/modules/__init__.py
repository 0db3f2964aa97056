"""What `placement.apply` returns: `StrategyModule` on ranks, `PlacedModule` on threads, `ModulePlaced` by module."""
