"""Splitting: an op becomes one op for each place of a mesh and each micro-batch, with exchanges where cuts disagree."""

from graphs.transforms.splitting.cuts import Axis, Sharding
from graphs.transforms.splitting.sharding import shard
from graphs.transforms.splitting.splitter import chunk, copies_of, split, split_as
from graphs.transforms.splitting.zero import Zero

__all__ = ["Axis", "Sharding", "Zero", "chunk", "copies_of", "shard", "split", "split_as"]
