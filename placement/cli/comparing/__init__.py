"""Modes of ``placement compare`` and ``placement optimize --sweep``: options in, a comparison on the terminal out."""
