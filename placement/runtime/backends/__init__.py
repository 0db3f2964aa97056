"""The ways to run a placed model; `registry` lists them, and a new one is added there."""
