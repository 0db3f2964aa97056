"""Bounds on strategies: how far ops may be cut, seconds of their copies, and the filling of a pipeline."""
