"""Strategies that are exported here are computed beside the model elsewhere: tests/placement/runtime/checking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from placement import optimization
from placement.solving.checked import unchecked


@pytest.fixture(autouse=True, scope="module")
def _unchecked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimization, "check", unchecked)
        yield
