"""Processes of a model, one for each device: `RankGroup`, how they meet, start, send tensors and say why they end."""
