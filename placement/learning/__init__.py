"""Learned placement: networks, policies, learners that train them, and training runs on disk. Imports torch."""
