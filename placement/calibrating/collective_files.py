"""Collectives from the output of nccl-tests."""

from __future__ import annotations

from pathlib import Path

from env.device import MeasuredCollective
from graphs.errors import ClusterError


def read_collectives(path: str | Path) -> list[MeasuredCollective]:
    """The collectives of a log of nccl-tests.

    Raises:
        ClusterError: it cannot be read, or is no such log.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot read collectives from {path}: {error.strerror}; check the path.") from None
    raise ClusterError(f"{path} is no output of nccl-tests: {len(text)} characters.")
