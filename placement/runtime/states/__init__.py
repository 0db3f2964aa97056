"""Number formats of parameters and gradients in a user's model, and master copies of narrow ones."""
