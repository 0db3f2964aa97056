"""Comparing: methods, strategies, clusters, sizes, figures, seeds or problems side by side, in rows, best first.

`placement` hands out the verbs `compare`, `compare_strategies`, `compare_seeds` and `suite`; `what_if` and
`over_batches` are in `placement.comparing.sweeps`, `what_helps` is in `placement.comparing.figures`.
"""
