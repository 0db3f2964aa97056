"""`own_version`: the version of the distribution that all four packages are."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The installed version; "uninstalled" where the packages run from a clone, by ``PYTHONPATH``."""
    try:
        return version("placement")
    except PackageNotFoundError:
        return "uninstalled"
