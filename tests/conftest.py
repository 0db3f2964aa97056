"""Settings of the whole suite: examples are the same in every run, and no test depends on how fast the machine is."""

import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from placement.cli import output

# Of a law that takes milliseconds; one that takes longer says how many. Those of every night begin with those of a day.
settings.register_profile(
    "suite", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("night", settings.get_profile("suite"), max_examples=150)
settings.load_profile("suite")

output.EVERY_S = 1e6  # stderr does not depend on how long a command takes

# A shell that starts the suite in the background ignores Ctrl-C for it, and its processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """End the process group that a strategy of one device has made in this process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
