"""Routines in one process, a thread for each device: PyTorch lets go of Python's lock while a kernel runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from placement.runtime.program.device_layout import Key
from placement.runtime.program.routines import Routine, Routines
from placement.runtime.program.transfers import Transfer


class _Stopped(Exception):
    """Another device has failed, so a transfer will never come."""


_STOP = object()


class StepTransfers:
    """The transfers of one step, on their way from thread to thread."""

    def __init__(self, transfers: Mapping[int, Transfer], places: Sequence[torch.device]) -> None:
        self._boxes: dict[int, queue.SimpleQueue[Any]] = {tag: queue.SimpleQueue() for tag in transfers}
        self._target = {tag: places[transfer.target] for tag, transfer in transfers.items()}

    def expect(self, tag: int) -> None:
        """Nothing to prepare: the sender brings it."""

    def receive(self, tag: int) -> torch.Tensor:
        found = self._boxes[tag].get()
        if found is _STOP:
            raise _Stopped
        tensor: torch.Tensor
        tensor, copied = found
        if copied is not None and tensor.is_cuda:
            # The next computation on the device waits, not the thread that feeds it.
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(copied)
            tensor.record_stream(stream)
        elif copied is not None:
            copied.synchronize()
        return tensor

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        self._boxes[tag].put(moved(tensor, self._target[tag]))

    def stop(self) -> None:
        """Wake up whoever waits."""
        for box in self._boxes.values():
            box.put(_STOP)


def moved(tensor: torch.Tensor, place: torch.device) -> tuple[torch.Tensor, Any]:
    """The tensor on its way to another place, and an event that says when it is there (None: at once)."""
    if tensor.device == place:
        return tensor, None
    if tensor.device.type != "cuda" and place.type != "cuda":
        return tensor.to(place), None
    # On a stream of its own, after what has been computed so far, while the device goes on computing.
    with torch.cuda.device(place if place.type == "cuda" else tensor.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if tensor.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            moved = tensor.to(place, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    return moved, event


class Team:
    """One thread for each device but the first, whose routine runs in the caller's own."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        self.places = tuple(places)
        n_cpus = sum(place.type == "cpu" for place in places)
        self._threads = max(1, torch.get_num_threads() // max(1, n_cpus))
        self._starting = threading.Lock()
        self._pool = ThreadPoolExecutor(
            max(1, len(places) - 1), "device", initializer=torch.set_num_threads, initargs=(self._threads,)
        )

    def run(
        self, routines: Routines, section: int, exchange: StepTransfers, lookup: Callable[[int, Key], Any]
    ) -> list[dict[Key, Any]]:
        """Run a section on all devices; the results of each device, by key.

        Args:
            lookup: the value of each key that a device takes.

        Raises:
            Exception: what the first device that failed raised.
        """
        work = list(enumerate(routines.sections[section]))
        # All before anything runs: one device may write what it shares with another.
        taken = [[lookup(device, key) for key in routine.takes] for device, routine in work]
        is_inference = torch.is_inference_mode_enabled()
        with self._starting:  # of two calls at once one gets its threads first, or each waits for the other's
            waiting = [self._pool.submit(self._one, *item, exchange, taken, is_inference) for item in work[1:]]
        first: Future[dict[Key, Any]] = Future()
        n_threads = torch.get_num_threads()
        try:
            if n_threads != self._threads:
                torch.set_num_threads(self._threads)
            first.set_result(self._one(*work[0], exchange, taken, is_inference))
        except Exception as error:
            first.set_exception(error)
        except BaseException:
            exchange.stop()
            wait(waiting)
            raise
        finally:
            if n_threads != self._threads:
                torch.set_num_threads(n_threads)
        done = [first, *waiting]
        wait(done)
        failures = [failure for future in done if (failure := future.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
            raise failure
        return [future.result() for future in done]

    def _one(
        self, device: int, routine: Routine, exchange: StepTransfers, taken: list[list[Any]], is_inference: bool
    ) -> dict[Key, Any]:
        place = self.places[device]
        values, taken[device] = taken[device], []
        try:
            with _current(place), torch.inference_mode() if is_inference else torch.no_grad(), _no_autocast(place):
                given = routine.run(exchange, *values)
        except BaseException:
            exchange.stop()
            raise
        return dict(zip(routine.gives, given, strict=True))


def _current(place: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def _no_autocast(place: torch.device) -> AbstractContextManager[Any]:
    """The casts of a captured program are in it."""
    if torch.is_autocast_enabled(place.type):
        return torch.autocast(place.type, enabled=False)
    return nullcontext()
