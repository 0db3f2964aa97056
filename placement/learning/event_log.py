"""Figures of a training run for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from placement.learning.learners.learner import Update


class EventLog:
    """Writes the figures of every update under the number of placements scored so far.

    Args:
        folder: where; made if need be.
        samples: events after this count, left by an interrupted run, are purged.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=samples + 1 if samples else None)

    def add(self, update: Update, label: str, samples_per_s: float) -> None:
        """Note an update of the problem of that name."""
        figures = {
            f"{label}/best_s": update.best_s,
            f"{label}/mean_s": update.mean_s,
            f"{label}/feasible": update.feasible,
            "policy/entropy": update.entropy,
            "speed/samples_per_s": samples_per_s,
            **{f"policy/{name}": value for name, value in update.metrics.items()},
        }
        for name, value in figures.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, update.samples)

    def flush(self) -> None:
        """Put what is noted on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Put what is noted on the disk and end the log."""
        self._writer.close()
