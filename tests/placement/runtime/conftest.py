"""Settings of the tests of running a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from placement.processes.threads import single_threaded


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As many threads for the unplaced model as for each device, so that kernels add up in the same order."""
    with single_threaded():
        torch.manual_seed(0)
        yield
