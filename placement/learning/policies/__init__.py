"""Policies: distributions over placements, by name, and the files that they are kept in."""
