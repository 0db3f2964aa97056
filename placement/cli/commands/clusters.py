"""``placement clusters``: the clusters there are, and one of them in full."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from graphs.disk import write_atomically
from placement.cli.output import check_outputs, emit, emit_json, emit_rich, progress

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.communication.times import CollectiveTimes


PATTERN = "8xH100-nvswitch"


@dataclass(frozen=True, kw_only=True)
class ClustersOptions:
    """Options of ``placement clusters``."""

    name: str | None = None
    rates: str = "measured"
    as_json: bool = False
    as_toml: bool = False
    output: Path | None = None
    collectives: bool = False
    ranks: int | None = None


def clusters(given: ClustersOptions) -> None:
    """List the clusters there are: devices, memory, links, and where the figures come from."""
    _check(given)
    if given.name is None:
        _list_presets(given.as_json)
    else:
        from placement.cli.tables import cluster_details
        from placement.inputs.sources import cluster_at

        cluster = cluster_at(given.name, given.rates)
        if given.collectives and given.name == "local" and cluster.collectives and given.ranks is None:
            _show_compared(cluster, given.as_json)
            return
        if given.collectives:
            _show_collectives(cluster, given)
            return
        _write(given, cluster)
        if not _printed(given, cluster) and not given.output:
            emit_rich(*cluster_details(cluster))


def _check(given: ClustersOptions) -> None:
    """Raises: typer.BadParameter: options that do not go together."""
    if given.name is None and (given.as_toml or given.output):
        raise typer.BadParameter(f"--toml and --output need the name of a cluster, such as {PATTERN}.")
    if given.collectives and (given.name is None or given.as_toml or given.output):
        raise typer.BadParameter(
            f"--collectives needs the name of a cluster, such as {PATTERN}, and goes without --toml and --output."
        )
    if given.name is None and given.rates != "measured":
        raise typer.BadParameter(f"--rates needs the name of a cluster, such as {PATTERN}.")
    if given.ranks is not None and not given.collectives:
        raise typer.BadParameter("--ranks says how many devices --collectives are between; give it too.")
    check_outputs(given.output, inputs=[given.name])


def _list_presets(as_json: bool) -> None:
    from env.cluster import Cluster
    from env.presets import PRESETS

    known = [Cluster.preset(key) for key in PRESETS]
    if as_json:
        emit_json({"clusters": [cluster.to_dict() for cluster in known]})
        return
    from placement.cli.tables import clusters_table

    emit_rich(*clusters_table(known))


def _write(given: ClustersOptions, cluster: Cluster) -> None:
    if given.output:
        write_atomically(given.output, cluster.to_toml())


def _printed(given: ClustersOptions, cluster: Cluster) -> bool:
    if given.as_json:
        emit_json(cluster.to_dict())
    elif given.as_toml:
        emit(cluster.to_toml())
    return given.as_json or given.as_toml


def _show_collectives(cluster: Cluster, given: ClustersOptions) -> None:
    from env.communication.times import collective_times

    found = collective_times(cluster, given.ranks)
    if given.as_json:
        emit_json(
            {
                "cluster": cluster.name,
                "cluster_hash": cluster.hash,
                "collective": found.kind,
                "devices": list(found.devices),
                "verdict": _verdict(cluster, found),
                "crossings": [{"bytes": size, "algorithm": name} for size, name in found.crossings],
                "sizes": [
                    {"bytes": size, "best": best, "seconds": {name: row[k] for name, row in found.seconds.items()}}
                    for k, (size, best) in enumerate(zip(found.sizes, found.best, strict=True))
                ],
            }
        )
        return
    from placement.cli.tables import collectives_table

    emit(_verdict(cluster, found))
    emit_rich(*collectives_table(found))


def _show_compared(cluster: Cluster, as_json: bool) -> None:
    """Show the cost model's times of collectives on this machine beside measured ones."""
    with progress("measuring collectives"):
        from statistics import median

        from placement.measuring.machine.figures import CoreTime
        from placement.measuring.machine.links import compared
        from placement.measuring.machine.speeds import THOROUGH
        from placement.measuring.machine.workers import cores_for

        cores, before = cores_for(None), CoreTime.now()
        rows = compared(cluster, cores[: cluster.n_devices], THOROUGH)
        others = before.others(CoreTime.now(), len(cores)) if before is not None else None
    error = median(row.error for row in rows)
    if as_json:
        emit_json(
            {
                "cluster": cluster.name,
                "cluster_hash": cluster.hash,
                "median_error": error,
                "others": others,
                "collectives": [{**asdict(row), "error": row.error} for row in rows],
            }
        )
        return
    from placement.cli.tables import compared_collectives_table

    emit(f"collectives among {cluster.n_devices} cores: predictions are off by {error:.1%} in the median")
    emit_rich(*compared_collectives_table(rows))
    if others is not None:
        emit(f"other processes had {others:.0%} of the processor time meanwhile")


def _verdict(cluster: Cluster, found: CollectiveTimes) -> str:
    """The quickest algorithm from each size on, in a sentence."""
    from env.communication.as_used import AS_USED
    from placement.cli.tables import format_power_of_two

    (_, first), *rest = found.crossings
    turns = "".join(f", {name} from {format_power_of_two(size)} on" for size, name in rest)
    what = f"{found.kind.replace('_', '-')} among {len(found.devices)} devices of {cluster.name}"
    if first == AS_USED:
        return f"{what}: as the library carries it out, whatever algorithm is asked for"
    return f"{what}: {first} is the quickest{turns}"
