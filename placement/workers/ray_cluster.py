"""`joined`: this process in a Ray cluster, one that runs already or one of this machine that ends with it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphs.errors import WorkersError
from graphs.formatting import format_bytes, show

_STORE_BYTES = 256 * 2**20  # that workers of this machine share
_SHARED_MEMORY = Path("/dev/shm")
_ANSWER_S = 5.0  # that a cluster has to answer
_HERE = "leave out the address to run on this machine"
# Before Ray is imported: it asks nothing of the network, and leaves the accelerators as they are.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


@contextmanager
def joined(workers: int, address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster with a core for each worker.

    Raises:
        WorkersError: no Ray, no cluster at the address, one of another version, or one too small.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    loaded = sys.modules.get("ray")
    if address is None and (loaded is None or not loaded.is_initialized()):
        _take_secret()
    try:
        import ray
    except ImportError:
        raise WorkersError(
            "several workers take Ray, which is not installed; run pip install 'placement[ray]', or leave out workers "
            "to run in this process."
        ) from None
    if address is not None:
        _check_answers(address)
    was_there = ray.is_initialized()  # the caller's own
    if not was_there:
        _connect(ray, workers, address)
    try:
        resources: Any = ray.cluster_resources
        cores = int(resources().get("CPU", 0))
        if cores < workers:
            raise WorkersError(
                f"{workers} workers take a core each, and the Ray cluster has {cores}; take fewer, or add machines."
            )
        yield ray
    finally:
        if not was_there:
            ray.shutdown()


def _take_secret() -> None:
    """Let Ray, which listens on all interfaces and runs what it is sent, do so for who knows a secret of this process.

    Ray reads it when it is imported, and again if it is asked to.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if sys.modules.get("ray") is not None:
        internals = sys.modules["ray"]._raylet
        internals.AuthenticationTokenLoader.instance().reset_cache()
        internals.Config.initialize("")


def _connect(ray: Any, workers: int, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        _check_shared_memory()
        options |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    else:
        options["address"] = address
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own: files and processes that it leaves to Python to close
        try:
            ray.init(**options)
        except (ConnectionError, TimeoutError) as error:
            raise WorkersError(f"no Ray cluster answers at {show(str(address))} ({_first(error)}); {_HERE}.") from None
        except RuntimeError as error:
            if "ersion" not in str(error):
                raise WorkersError(f"Ray does not start: {_first(error)}; leave out workers to run here.") from None
            raise WorkersError(
                f"the Ray cluster at {show(str(address))} is of another version ({_first(error)}); install the same "
                f"version of Ray and Python there and here, or {_HERE}."
            ) from None


def _check_shared_memory() -> None:
    """Raises: WorkersError: too little for what workers share."""
    if not _SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < _STORE_BYTES:
        raise WorkersError(
            f"workers share {format_bytes(_STORE_BYTES)} in {_SHARED_MEMORY}, where {format_bytes(free)} are free; "
            "make room there (a container takes --shm-size=1g), or leave out workers to run in this process."
        )


def _check_answers(address: str) -> None:
    """Raises: WorkersError: it is no address, or nobody is there; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 2**16):
        raise WorkersError(f"address {show(address)} is none; expected auto or HOST:PORT, as `ray start` prints it.")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise WorkersError(f"no Ray cluster answers at {show(address)} ({error}); {_HERE}.") from None


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].removesuffix(".")[:300]
