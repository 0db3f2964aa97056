"""Learned placement: policies, their training, and the files they are kept in. Imports torch."""
