"""Inputs: the graphs, models and clusters that the arguments of a command stand for."""
