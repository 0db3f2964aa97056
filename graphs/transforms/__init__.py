"""Transforms: graph in, graph out, without knowing devices or times; a room for each, and a `Strategy` lists them."""
