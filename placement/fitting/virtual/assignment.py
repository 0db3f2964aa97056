"""`Assignment`: which participant is on which devices of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.errors import FitError
from graphs.formatting import counted
from graphs.records import LANE

if TYPE_CHECKING:
    from env.cluster import Cluster


@dataclass(frozen=True)
class Assignment:
    """Devices by number.

    Attributes:
        workers: of each worker; the first one sends and receives for it.
        servers: of each server.
    """

    workers: tuple[tuple[int, ...], ...]
    servers: tuple[int, ...]

    @property
    def device(self) -> tuple[int, ...]:
        """Device from which each participant sends, and at which it receives."""
        return (*(own[0] for own in self.workers), *self.servers)

    @classmethod
    def of(cls, cluster: Cluster, workers: int, devices_each: int, servers: Sequence[str | None]) -> Assignment:
        """Workers one after the other on the devices that compute; servers where they say.

        A server that does not say is on a CPU beside them, each on the next one; where there is none, with the next
        worker.

        Raises:
            FitError: more workers than devices, or no device of a server's name.
        """
        devices = most_workers(cluster, workers, devices_each)
        ends = range(devices_each, workers * devices_each + 1, devices_each)
        of_workers = tuple(tuple(devices[end - devices_each : end]) for end in ends)
        hosts = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu" and d not in devices]
        anywhere = hosts or [own[0] for own in of_workers]
        found = []
        for number, name in enumerate(servers):
            if name is None:
                found.append(anywhere[number % len(anywhere)])
            elif name in cluster.device_index:
                found.append(cluster.device_index[name])
            else:
                known = ", ".join(device.name for device in cluster.devices if device.kind != LANE)
                raise FitError(
                    f"the method has a server on {name!r}, and cluster {cluster.name!r} has no such device; take one "
                    f"of {known}."
                )
        return cls(of_workers, tuple(found))


def most_workers(cluster: Cluster, workers: int, devices_each: int) -> list[int]:
    """The devices that compute.

    Raises:
        FitError: too few for so many workers.
    """
    devices: list[int] = cluster.compute_devices.tolist()
    if not 1 <= workers <= len(devices) // devices_each:
        each = "" if devices_each == 1 else f" on {devices_each} devices each"
        most = "1" if len(devices) < 2 * devices_each else f"1 to {len(devices) // devices_each}"
        raise FitError(
            f"{counted(workers, 'worker')}{each} {'was' if workers == 1 else 'were'} asked for, and cluster "
            f"{cluster.name!r} has {counted(len(devices), 'device')} that compute{'s' if len(devices) == 1 else ''}; "
            f"give {most}."
            if len(devices) >= devices_each
            else f"a worker takes {devices_each} devices, and cluster {cluster.name!r} has {len(devices)}; take a "
            "smaller strategy."
        )
    return devices
