"""The ways to run a placed model: `registry.BACKENDS` lists them, and a new one is added there."""
