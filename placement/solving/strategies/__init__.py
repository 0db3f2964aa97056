"""A search over every strategy, within one budget with placing the graph as it is; one strategy as a `Result`."""
