"""Placers: heuristics that pick a device for every op and leave the order to the simulator's priority."""
