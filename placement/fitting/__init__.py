"""Fitting: replicas of one model that train together, method beside method, and how soon they reach a loss.

A wing of its own: `fit`, its command and its report stand here, and nothing else imports it. `placement` hands out
`fit` and `FitComparison`; `sweep.sweep_fit` varies workers or batches; `registry` names the parts of methods.
"""
