"""The torch runner: a model under a strategy, by the parts of torch. `placement export --to torch` prints this code."""
