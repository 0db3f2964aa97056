"""Commands about what there is: models, clusters, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import options
from placement.cli.measuring import measured_now, show_measured
from placement.cli.output import check_outputs, emit, emit_json, emit_rich, progress

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", show_default=False, help="Which models; all by default.")
    ] = None,
    train: options.Train = False,
    as_json: options.Json = False,
) -> None:
    """List the built-in models: ops, edges, FLOPs, bytes, and how much placement can gain at best."""
    from graphs.errors import UnknownNameError
    from graphs.zoo import MODELS
    from graphs.zoo.cache import model_graph
    from placement.solving.speedup_limit import potential, reference_device

    chosen = names or list(MODELS)
    for name in chosen:
        if name not in MODELS:
            raise UnknownNameError("model", name, MODELS)
    device = reference_device()
    rows = []
    with progress("starting", len(chosen)) as report:
        for done, name in enumerate(chosen):
            report(f"reading {name} (captured once, then kept)", done)
            graph = model_graph(name, train)
            gain = potential(graph, device)
            rows.append(
                {
                    "name": name,
                    "summary": MODELS[name].summary,
                    "source": MODELS[name].source,
                    "batch_size": MODELS[name].batch_size,
                    "ops": graph.n_ops,
                    "edges": graph.n_edges,
                    "flops": float(graph.flops.sum()),
                    "bytes_moved": float(graph.bytes_moved.sum()),
                    "kept_bytes": int(graph.kept_bytes.sum()),
                    "work_s": gain.work_s,
                    "critical_path_s": gain.critical_path_s,
                    "best_speedup": gain.best_speedup,
                }
            )
    if as_json:
        emit_json({"train": train, "device": device.model, "models": rows})
        return
    from placement.cli.tables import models_table

    emit_rich(*models_table(rows, device.model))


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE", show_default=False, help="Show this cluster in full; all of them by default."
        ),
    ] = None,
    as_json: options.Json = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the named cluster as TOML, to be changed.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Write the named cluster as TOML."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: the cluster 'local' from now on.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="COUNT",
            min=1,
            show_default=False,
            help="With --measure: take that many CPU cores as devices, instead of all cores or all GPUs and the CPU.",
        ),
    ] = None,
) -> None:
    """List the clusters there are: devices, memory, links, and where the figures come from."""
    from env.cluster import Cluster
    from env.presets import PRESETS
    from placement.inputs.cluster_json import cluster_to_dict
    from placement.inputs.sources import read_cluster

    if name is None and (as_toml or output) and not measure:
        raise typer.BadParameter(f"--toml and --output need the name of a cluster, one of {', '.join(PRESETS)}.")
    if measure and name not in (None, "local"):
        raise typer.BadParameter(f"--measure is about this machine, not about {name}; leave one of them out.")
    if devices is not None and not measure:
        raise typer.BadParameter("--devices says what to --measure; give it too.")
    check_outputs(output, inputs=[name])
    if name is None and not measure:
        known = [Cluster.preset(key) for key in PRESETS]
        if as_json:
            emit_json({"clusters": [cluster_to_dict(cluster) for cluster in known]})
            return
        from placement.cli.tables import clusters_table

        emit_rich(*clusters_table(known))
        return
    measured = None
    if measure or name is None:
        measured = measured_now(devices)
        cluster = measured.cluster
    else:
        cluster = read_cluster(name)
    if output:
        from graphs.disk import write_atomically

        write_atomically(output, cluster.to_toml())
    if as_json:
        emit_json(cluster_to_dict(cluster))
    elif as_toml:
        emit(cluster.to_toml())
    elif measured is not None:
        show_measured(measured, devices, output)
    elif not output:
        from placement.cli.tables import cluster_details

        emit_rich(*cluster_details(cluster))


def capture(
    graph: options.Graph,
    output: options.Output = None,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
) -> None:
    """Read or capture a graph and save it as JSON."""
    if output is None and not as_json:
        from placement.inputs.sources import check_name

        check_name(graph)
        raise typer.BadParameter(
            "capture saves a graph; say where with --output FILE, or print its figures with --json."
        )
    check_outputs(output, inputs=[graph])
    sizes = options.parse_dims(dims)
    with progress(f"reading {graph}"):
        from placement.inputs.sources import read_source

        captured = read_source(graph, train=train, granularity=granularity, dims=sizes).graph
    if output is not None:
        from graphs.files import save_graph

        save_graph(captured, output)
    figures = _figures(captured) | {"file": None if output is None else str(output)}
    if as_json:
        emit_json(figures)
        return
    from placement.cli.tables import graph_figures

    emit_rich(*graph_figures(captured, figures), f"saved to {output}")


def _figures(graph: OpGraph) -> dict[str, Any]:
    from graphs.kept import activation_bytes
    from placement.solving.speedup_limit import peak_bytes, reference_device

    return {
        "graph": graph.name,
        "hash": graph.hash,
        "ops": graph.n_ops,
        "edges": graph.n_edges,
        "flops": float(graph.flops.sum()),
        "bytes_moved": float(graph.bytes_moved.sum()),
        "kept_bytes": int(graph.kept_bytes.sum()),
        "parameter_bytes": int(graph.parameter_bytes.sum()),
        "gradient_bytes": int(graph.gradient_bytes.sum()),
        "optimizer_bytes": int(graph.optimizer_bytes.sum()),
        "optimizer": graph.origin.optimizer,
        "activation_bytes": activation_bytes(graph),
        "peak_bytes": peak_bytes(graph, reference_device()),
    }
