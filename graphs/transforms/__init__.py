"""Graph in, graph out: rewrites of an `OpGraph` that know no devices."""
