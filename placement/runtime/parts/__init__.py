"""Parts of tensors: `PartLayout`, the stretches of a tensor that are here, and `shard_of`, a process's own samples."""
