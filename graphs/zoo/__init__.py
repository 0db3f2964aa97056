"""The model zoo: the networks of the placement papers, by name, as real `nn.Module`s. Importing it loads no torch."""

from graphs.zoo.registry import MODELS, ModelSpec, ZooModel, build

__all__ = ["MODELS", "ModelSpec", "ZooModel", "build"]
