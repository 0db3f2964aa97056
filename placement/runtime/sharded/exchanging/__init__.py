"""Collectives of ranks: the tensors exchanged, and the transport between processes or threads."""
