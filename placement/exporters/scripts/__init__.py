"""Scripts: how is a strategy said in plain PyTorch?"""
