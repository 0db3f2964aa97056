"""How one tensor gets from one process to another."""
