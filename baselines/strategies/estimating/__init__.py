"""Estimates of a strategy's time and memory without its graph, to choose the candidates that are scored."""
