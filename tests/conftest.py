"""Settings of the whole suite: examples are the same in every run, and no test depends on how fast the machine is."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A shell that starts the suite in the background ignores Ctrl-C for it, and its processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
