"""How does the work of the search over strategies grow with devices, and with ops?

    python benchmarks/strategy_scale.py [--devices 8,16,...] [--layers 4,8,...] [--seed 0] [--markdown]

The training step of a decoder (width 2,048, 2,048 tokens, 1,024 sequences, or one for each replica where there are
more) on hosts of eight H100. First its four
layers on more and more devices, then more and more layers on 64 devices, as dpN zero1 | tp8. Timed are:

* the cluster: the routes between all pairs of devices;
* an estimate: the first one, with all that later ones share;
* a step of the search: estimates of the first `NEIGHBOURS` legal neighbours of the strategy;
* the folded score: the strategy carried out for one place of the mesh, and simulated.

Each row is a process of its own, so that nothing is known from rows before; compiled code is loaded first. Seconds are
those of the processor. Beside each is the growth since the row before, divided by that of n log n, where n is devices
or ops: 1 or less grows no faster.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, pairwise

import torch
from table import Printer, parser

from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.moves import neighbours
from env.cluster import Cluster
from env.resizing import resized
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from graphs.zoo.decoders import Decoder, DecoderConfig

HOST = 8  # devices, and parts of tensor parallelism
NEIGHBOURS = 20
FIXED_LAYERS, FIXED_DEVICES = 4, 64
COLUMNS = ("cluster", "estimate", "search step", "folded score")

Row = tuple[int, int, tuple[float, ...]]  # devices, ops, seconds by `COLUMNS`


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--devices", default="8,16,32,64,128,256,512,1024,10240", help="default: %(default)s")
    options.add_argument("--layers", default="4,8,16,32,64", help="default: %(default)s")
    given = options.parse_args()
    show = Printer("How the work of the search over strategies grows", given.markdown)
    devices = [int(word) for word in given.devices.split(",")]
    rows = [_in_a_process(n, FIXED_LAYERS, given.seed) for n in devices]
    _table(show, f"Devices, {FIXED_LAYERS} layers", "devices", [(n, seconds) for n, _, seconds in rows])
    rows = [_in_a_process(FIXED_DEVICES, int(word), given.seed) for word in given.layers.split(",")]
    _table(show, f"Ops, {FIXED_DEVICES} devices", "ops", [(ops, seconds) for _, ops, seconds in rows])


def _table(show: Printer, caption: str, what: str, rows: list[tuple[int, tuple[float, ...]]]) -> None:
    lines, before = [], None
    for n, seconds in rows:
        cells = [f"{n:,}"]
        for i, found in enumerate(seconds):
            growth = "" if before is None else f"{_growth(before[0], n, before[1][i], found):.2f}"
            cells += [f"{found:.3f} s", growth]
        lines.append(cells)
        before = n, seconds
    show.table(caption, [what, *(cell for name in COLUMNS for cell in (name, "/ n log n"))], lines)
    if len(rows) > 1:
        (few, first), (many, last) = rows[0], rows[-1]
        whole = [f"{name} {_growth(few, many, a, b):.2f}" for name, a, b in zip(COLUMNS, first, last, strict=True)]
        show.note(f"From {few:,} to {many:,} {what}, as a share of n log n: {', '.join(whole)}.")


def _growth(few: int, many: int, before_s: float, after_s: float) -> float:
    return (after_s / max(before_s, 1e-9)) / (many * math.log(many) / (few * math.log(few)))


def _in_a_process(devices: int, layers: int, seed: int) -> Row:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_row, devices, layers, seed).result()


def _row(devices: int, layers: int, seed: int) -> Row:
    small = _cluster(HOST)
    _seconds(_graph(1, seed), small, HOST)  # loads what is compiled
    graph, began_s = _graph(layers, seed, devices), time.process_time()
    cluster = _cluster(devices)
    _ = cluster.routes
    cluster_s = time.process_time() - began_s
    return devices, graph.n_ops, (cluster_s, *_seconds(graph, cluster, devices))


def _seconds(graph: OpGraph, cluster: Cluster, devices: int) -> tuple[float, float, float]:
    """Processor seconds of an estimate, a step of the search and a folded score."""
    replicas = devices // HOST
    strategy = Strategy.parse(f"dp{replicas} zero1 | tp{HOST}" if replicas > 1 else f"tp{HOST}")
    estimator = Estimator(graph, cluster)
    marks = [time.process_time()]
    estimator.estimate(strategy)
    marks.append(time.process_time())
    legal = (one for _, one in neighbours(graph, cluster, strategy) if _is_estimated(estimator, one))
    for _ in islice(legal, NEIGHBOURS):
        pass
    marks.append(time.process_time())
    what = applied(graph, cluster, strategy, folded=True)
    Simulator(what.problem).score(what.plan)
    marks.append(time.process_time())
    estimate_s, step_s, score_s = (after - before for before, after in pairwise(marks))
    return estimate_s, step_s, score_s


def _is_estimated(estimator: Estimator, strategy: Strategy) -> bool:
    try:
        estimator.estimate(strategy)
    except StrategyError:
        return False
    return True


def _cluster(devices: int) -> Cluster:
    return resized(Cluster.preset("2x8xH100-ib", rates="peak"), devices)


def _graph(layers: int, seed: int, devices: int = HOST) -> OpGraph:
    torch.manual_seed(seed)
    config = DecoderConfig(
        max(1024, devices // HOST), 2048, layers, 2048, heads=16, key_value_heads=8, inner_width=5632, vocabulary=32_000
    )
    with torch.device("meta"):
        model = Decoder(config)
        words = torch.zeros((config.batch_size, config.tokens), dtype=torch.int64)
    return capture(model, (words, words), train=True)


if __name__ == "__main__":
    main()
