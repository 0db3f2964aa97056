"""Collectives of ranks: an `Exchange` says who gives and gets which parts, `Collectives` carries it out."""
