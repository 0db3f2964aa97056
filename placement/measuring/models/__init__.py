"""Measuring a model: the time of each of its ops on a device.

`profiling.profile` measures a model's graph, `op_times` a step op by op with the routines of `op_clock`; `repeats` says
how often a step is run until its median is known.
"""
