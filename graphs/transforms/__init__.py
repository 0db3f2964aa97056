"""Transforms: graph in, graph out, without knowing devices or times; a file or room for each, so far `coarsen`."""
