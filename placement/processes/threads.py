"""One thread for torch: sums then come in one order whatever the machine, and small networks are quickest so."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from placement.processes.processes import usable_cores

_SWITCH_S = 1e-4  # for threads that receive: they would wait 5 ms for the one that computes


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


def on_one_core(number: int) -> None:
    """Keep this process to one core, of those that it may use in turns, and to one thread of torch."""
    if hasattr(os, "sched_setaffinity"):
        cores = usable_cores()
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_S)
