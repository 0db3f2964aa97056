"""Readers for graphs made elsewhere: ONNX, `torch.export`, and two published formats; `graphs.load_graph` picks one.

Nothing is imported here, because onnx and torch take a while.
"""
