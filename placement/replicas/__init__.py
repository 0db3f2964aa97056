"""Replicas of one model that train together: what they exchange, when they wait, and how soon they reach a loss."""
