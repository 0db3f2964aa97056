"""The model zoo: the networks of the placement papers, by name, as real `nn.Module`s. Importing it loads no torch."""

from graphs.zoo.records import ModelSpec, ZooModel
from graphs.zoo.registry import MODELS, build

__all__ = ["MODELS", "ModelSpec", "ZooModel", "build"]
