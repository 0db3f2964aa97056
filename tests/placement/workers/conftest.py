"""One local Ray cluster of two cores for all tests of this folder that need one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_of_two() -> Iterator[Any]:
    """Ray, with a cluster of two cores and 128 MiB of shared memory."""
    from placement.workers.ray_cluster import joined

    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own: files that it leaves to Python to close
        with joined(2, None) as ray:
            yield ray
