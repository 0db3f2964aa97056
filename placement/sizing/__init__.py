"""Sizing: how many devices does a model need, of which size is its batch, and what do more of them bring?"""
