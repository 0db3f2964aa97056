"""Exchanges of replicas, their messages and their times: one file for each family, `averaging.Exchange` the base."""
