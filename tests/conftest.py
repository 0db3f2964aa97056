"""Settings of the whole suite: examples are the same in every run, and no test depends on how fast the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
