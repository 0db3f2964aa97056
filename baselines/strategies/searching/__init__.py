"""The search over strategies: which exist, what each would take, which are scored exactly, and how far from optimal."""
