"""Measuring a machine: speeds of its devices, links between them, and collectives of all.

`local_machine.local_cluster` and `measured_machine` measure everything; `workers.run_workers` runs a function in a
process on each core; `speeds`, `links` and `figures` measure and judge single figures.
"""
