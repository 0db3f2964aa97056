"""Whether any strategy beats the bounds over strategies: random graphs, clusters and strategies, scored.

    PYTHONPATH=.:tests/helpers python benchmarks/bounds.py --seed 0 [--cases 10000] [--each 25] [--first 0]

A case is a strategy that graph and cluster allow, carried out and scored by the simulator, beside the bound over all
strategies and that of its family. EACH are tried on every graph and cluster: small models of the zoo and a perceptron,
whose ops cost anything, on one to four hosts of devices of any speeds, on links of any speed; strategies of every
family, some with neighbours' moves, every order of a pipeline, and parts whose ops are placed one by one. One that is
not allowed does not count. Prints how many cases there were, how near each family's nearest came to its bound, and all
that beat it; then the exit code is 1.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from parallel.every_strategy import SYNCHRONOUS, meshes
from table import Printer, parser
from training_steps import mlp

from baselines.strategies.searching.bound import ALL, ONE_DEVICE, WITH_HOST, strategy_bounds
from baselines.strategies.searching.families import family_of
from baselines.strategies.searching.moves import neighbours
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster, Device, both_ways
from graphs.capture import capture
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.records import HOST
from graphs.transforms.strategy import ACTIVATIONS, OPTIMIZER, PARAMETERS, PLACED, Strategy
from graphs.zoo import build

MODELS = ("mlp", "mlp", "gpt2", "bert_base", "resnet50", "rnnlm", "transformer_moe", "two_tower", "alexnet")
OFFLOADS = ((), (), (OPTIMIZER, ACTIVATIONS), (PARAMETERS,), (PARAMETERS, ACTIVATIONS))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--cases", type=int, default=10_000, help="strategies scored in all (default: %(default)s)")
    made.add_argument(
        "--each", type=int, default=25, help="strategies tried on a graph and cluster (default: %(default)s)"
    )
    made.add_argument(
        "--first", type=int, default=0, help="number of the first graph and cluster (default: %(default)s)"
    )
    options = made.parse_args()
    nearest: dict[str, list[float]] = defaultdict(list)
    wrong, scores, number = [], 0, options.first
    while scores < options.cases:
        for family, text, step_s, bound_s in _cases(np.random.default_rng([options.seed, number]), options.each):
            nearest[family].append(step_s / bound_s if bound_s > 0 else np.inf)
            scores += family == ALL
            if step_s < bound_s:
                wrong.append((number, family, text, step_s, bound_s))
                print(
                    f"problem {number}: {text} takes {step_s:.9g} s, its bound ({family}) is {bound_s:.9g} s",
                    flush=True,
                )
        number += 1
    printer = Printer("Strategies beside their bounds", options.markdown)
    rows = [
        (name, str(len(each)), f"{min(each):.4f}", f"{np.median(each):.2f}") for name, each in sorted(nearest.items())
    ]
    caption = f"{scores} strategies on {number - options.first} graphs and clusters: {len(wrong)} bounds are wrong"
    printer.table(caption, ("family", "strategies", "nearest step / bound", "median"), rows)
    return int(bool(wrong))


def _cases(rng: np.random.Generator, tries: int) -> Iterator[tuple[str, str, float, float]]:
    """``(family, strategy, step time, bound)`` of the strategies that one graph and cluster allow."""
    graph, cluster = _graph(rng), _cluster(rng)
    work_s = float(graph.flops.sum() / 1e9 / graph.n_ops)
    cluster = _with_launches(cluster, float(rng.choice((0.0, 1e-3, 0.1, 1.0, 10.0))) * work_s)
    bounds = {keeps: strategy_bounds(graph, cluster, keeps) for keeps in (False, True)}
    for _ in range(tries):
        strategy = _strategy(rng, graph, cluster)
        try:
            step_s = scored(graph, cluster, strategy).step_time_s
        except PlacementError:
            continue
        found = bounds[strategy.statistics != "local"]
        alone = WITH_HOST if strategy.offload else ONE_DEVICE
        family = family_of(strategy) or (alone if strategy.stages == 1 else ALL)
        yield ALL, strategy.text, step_s, found[ALL]
        if family != ALL:
            yield family, strategy.text, step_s, found[family]


@cache
def _model(name: str) -> OpGraph:
    made = build(name, small=True, batch_size=4)
    return capture(made.model, made.train_args, train=True)


def _graph(rng: np.random.Generator) -> OpGraph:
    name = str(rng.choice(MODELS))
    graph = mlp(batch=int(rng.choice((4, 8))), layers=int(rng.integers(1, 6))) if name == "mlp" else _model(name)
    spread = rng.choice((0.0, 0.3, 1.0, 3.0))
    return replace(
        graph,
        flops=graph.flops * np.exp(spread * rng.standard_normal(graph.n_ops)),
        bytes_moved=graph.bytes_moved * np.exp(spread * rng.standard_normal(graph.n_ops)),
        kernels=np.where(graph.kernels > 0, rng.integers(1, 4, graph.n_ops), 0),
    )


def _cluster(rng: np.random.Generator) -> Cluster:
    """One host or several, of one to four devices; sometimes one more, which offloads."""
    hosts, each = int(rng.choice((1, 1, 2, 4))), int(rng.integers(1, 5))
    each = max(each, 2) if hosts == 1 else min(each, 2)
    speeds = 1e9 * rng.choice((1.0, 1.0, 0.5, 0.01) if rng.random() < 0.4 else (1.0,), (hosts, each))
    names = [[f"host{h}/gpu{d}" for d in range(each)] for h in range(hosts)]
    devices = [
        Device(name, "gpu", 2**60, {"float32": speed}, speed)
        for of_host, some in zip(names, speeds.tolist(), strict=True)
        for name, speed in zip(of_host, some, strict=True)
    ]
    inside, between = (float(10.0 ** rng.choice((7, 9, 11, 30))) for _ in range(2))
    latency_s = float(rng.choice((0.0, 1e-6, 1e-3)))
    links = []
    for h, of_host in enumerate(names):
        links += [link for name in of_host for link in both_ways(name, f"host{h}/switch", inside, latency_s)]
        if hosts > 1:
            links += both_ways(f"host{h}/switch", "switch", between, latency_s)
    if rng.random() < 0.15:
        devices.append(Device("cpu0", HOST, 2**60, {"float32": 1e9}, 1e9))
        links += both_ways("cpu0", "host0/switch", 1e12, 0.0)
    return Cluster("random", tuple(devices), tuple(links))


def _with_launches(cluster: Cluster, launch_s: float) -> Cluster:
    return replace(cluster, devices=tuple(replace(each, launch_overhead_s=launch_s) for each in cluster.devices))


def _strategy(rng: np.random.Generator, graph: OpGraph, cluster: Cluster) -> Strategy:
    count = len(cluster.compute_devices)
    some = list(meshes(count))
    mesh = () if rng.random() < 0.4 else some[int(rng.integers(len(some)))]
    stages = int(rng.integers(1, count // Strategy(mesh).devices + 1))
    order = str(rng.choice((*SYNCHRONOUS, *((PLACED, PLACED) if mesh else ())))) if stages > 1 else "1f1b"
    has_dp = any(rule.name == "dp" for rule in mesh)
    has_host = bool((cluster.host_devices >= 0).any())
    strategy = Strategy(
        mesh,
        stages,
        order,
        micro_batches=1 if order == PLACED else int(rng.choice((1, 1, 2, 3, 4))),
        zero=int(rng.integers(4)) if has_dp else 0,
        recompute=("*",) if rng.random() < 0.2 else (),
        offload=OFFLOADS[int(rng.integers(len(OFFLOADS)))] if has_host and order != PLACED else (),
        fused_updates=bool(rng.random() < 0.5),
        statistics=str(rng.choice(("local", "sync"))),
    )
    for _ in range(int(rng.choice((0, 0, 0, 1, 2)))):
        try:
            moved = [other for _, other in neighbours(graph, cluster, strategy)]
        except PlacementError:  # the strategy is not allowed itself
            break
        strategy = moved[int(rng.integers(len(moved)))] if moved else strategy
    return strategy


if __name__ == "__main__":
    sys.exit(main())
