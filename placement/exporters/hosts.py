"""Hosts: how many a strategy takes, and how many of its processes each of them runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.strategies.folding import grid_of
from env.device import host_of
from env.lanes import without_lanes
from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from placement.results.result import Result


def hosts_of(result: Result, strategy: Strategy) -> tuple[str, ...]:
    """Names of the hosts whose devices the strategy takes, in the order of its ranks; one "" where names say nothing.

    Raises:
        MismatchError: launchers start equally many processes on each host and number them host by host, and the
            strategy's ranks lie otherwise.
    """
    found = processes_of(result, strategy)
    if len(set(found.values())) > 1:
        raise _order_error(strategy, found, "start equally many on each host")
    return tuple(found)


def processes_of(result: Result, strategy: Strategy) -> dict[str, int]:
    """How many of the strategy's processes each host runs, by its name, in the order of the ranks.

    Raises:
        MismatchError: launchers number processes host by host, and the strategy's ranks lie otherwise.
    """
    cluster = without_lanes(result.cluster)
    if cluster.n_devices < strategy.devices:  # one place of the mesh stands for all
        return {"": strategy.devices}
    by_rank = [host_of(cluster.devices[d].name) or "" for d in grid_of(cluster, strategy).reshape(-1).tolist()]
    found = {host: by_rank.count(host) for host in dict.fromkeys(by_rank)}
    axes = sum(rule.size > 1 for rule in strategy.mesh) + (strategy.stages > 1)
    has_order = axes > 1 or len(set(found.values())) > 1
    if has_order and by_rank != [host for host, count in found.items() for _ in range(count)]:
        raise _order_error(strategy, found, "number them host by host")
    return found


def _order_error(strategy: Strategy, found: dict[str, int], how: str) -> MismatchError:
    places = ", ".join(f"{count} of {host or 'no host'}" for host, count in found.items())
    return MismatchError(
        f"strategy {show(strategy.text)} has its ranks on {places}, in the order of 'devices=', and launchers of "
        f"processes {how}; leave 'devices=' out, or name the devices host by host."
    )
