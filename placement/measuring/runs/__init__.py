"""Measuring whole steps of a placement or a strategy, in a process for each device.

`trial.try_out` runs one beside the plain model and compares what they compute; `executor.Executor` runs many in
processes that stay.
"""
