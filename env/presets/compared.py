"""How far off predictions were where public runs say what a step took, by model of device (docs/results/truth.md)."""

from __future__ import annotations

NOT_COMPARED = "not compared with public runs yet"

COMPARED: dict[str, str] = {}


def compared(models: list[str]) -> str:
    """A sentence for a cluster of devices of these models."""
    found = dict.fromkeys(COMPARED[model] for model in models if model in COMPARED)
    return "; ".join(found) or NOT_COMPARED
