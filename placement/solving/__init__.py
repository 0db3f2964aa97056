"""Solving: a problem and the name of a method in, a `Result` out."""
