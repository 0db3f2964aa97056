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
    cluster = without_lanes(result.cluster)
    if cluster.n_devices < strategy.devices:  # one place of the mesh stands for all
        return ("",)
    by_rank = [host_of(cluster.devices[d].name) or "" for d in grid_of(cluster, strategy).reshape(-1).tolist()]
    hosts = tuple(dict.fromkeys(by_rank))
    each, rest = divmod(len(by_rank), len(hosts))
    is_even = not rest and all(by_rank.count(host) == each for host in hosts)
    axes = sum(rule.size > 1 for rule in strategy.mesh) + (strategy.stages > 1)
    if not is_even or (axes > 1 and by_rank != [host for host in hosts for _ in range(each)]):
        how = "number them host by host" if is_even else "start equally many on each host"
        places = ", ".join(f"{by_rank.count(host)} of {host or 'no host'}" for host in hosts)
        raise MismatchError(
            f"strategy {show(strategy.text)} has its ranks on {places}, in the order of 'devices=', and launchers of "
            f"processes {how}; leave 'devices=' out, or name the devices host by host."
        )
    return hosts
