"""Scripts: strategies in plain PyTorch."""
