"""Storage of a rank, by `RankStates`: its parts gathered, clipped, saved and loaded, the same on all ranks."""
