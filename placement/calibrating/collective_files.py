"""Collectives from the output of nccl-tests."""

from __future__ import annotations

from pathlib import Path

from env.communication.nccl_tests import read_nccl_tests
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
    except ValueError:
        raise ClusterError(
            f"cannot read collectives from {path}: it is no text; give the output of nccl-tests."
        ) from None
    try:
        return read_nccl_tests(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None
