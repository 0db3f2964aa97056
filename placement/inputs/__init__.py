"""What the GRAPH, MODEL and CLUSTER arguments of a command stand for."""
