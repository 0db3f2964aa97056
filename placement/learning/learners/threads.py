"""One thread for torch: sums then come in one order whatever the machine, and small networks are quickest so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def one_thread() -> None:
    """Let torch compute on one thread from here on.

    Said again before every use of a network: a compiled parallel loop sets the number for whoever shares its OpenMP.
    """
    torch.set_num_threads(1)


@contextmanager
def single_threaded() -> Iterator[None]:
    """`one_thread` inside, and as many threads as before after it."""
    before = torch.get_num_threads()
    one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)
