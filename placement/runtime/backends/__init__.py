"""The ways to run a placed model; `registry` lists them."""
