"""Solving: a problem and the name of a method in, a `Result` out.

`solver.Solver` runs one method, `strategy_row.strategy_row` carries out one strategy, and `best_of_all.best_of_all`
searches both, within one budget; `methods` has the names that there are.
"""
