"""The score a second time, in plain Python that shares no code with the simulator, and the checker of answers."""
