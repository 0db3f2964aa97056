"""What this machine takes: devices and links, ops, and whole placements really run."""
