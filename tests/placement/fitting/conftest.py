"""Settings of the tests of replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from placement.processes.threads import single_threaded


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, far slower where other processes compute as well."""
    with single_threaded():
        yield
