"""Stages of a pipeline in an exported script: which modules they have, and the code of those that borders cut."""
