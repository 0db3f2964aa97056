"""Train the graph policy that the package ships, over many graphs and clusters, on one core.

    python benchmarks/pretrain.py --seed 0 [--updates 1000] [--start policy.zip] [--out policy.zip]

Graphs: zoo models (inference and training steps), but for those held out (HELD_OUT_MODELS), training steps of captured
models (`captured.FOR_TRAINING`), what strategies make of training steps, and generated ones; clusters: presets, but for
those held out (HELD_OUT_CLUSTERS), random ones of 2 to 8 devices, and of 64 on eight hosts. The shipped file is older
than captured models, strategies and hosts: to go on with them made it no better (docs/training.md).

Every update draws a few problems and tastes for each (see GraphPolicy), and places by each of them; tastes that place
faster than the mean of their problem become likelier (policy gradients with parameter-based exploration, F. Sehnke et
al., Neural Networks 23, 2010, doi:10.1016/j.neunet.2009.12.004). The parameters that place the validation problems best
are kept on disk. The same seed and number of updates give the same file.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from captured import FOR_TRAINING, captured
from table import parser

import baselines
from baselines.strategies.applied import applied
from env.cluster import Cluster, Device, Link, both_ways
from env.plan import Plan
from env.presets.gpus import DEVICES as KNOWN
from env.presets.gpus import GIB
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError, StrategyError
from graphs.generators import GENERATORS
from graphs.opgraph import FloatArray, OpGraph
from graphs.transforms.strategy import Strategy
from graphs.zoo.cache import model_graph
from placement.learning.learners.pretrained import PRETRAINED, load_pretrained
from placement.learning.policies.graph_policy import GraphPolicy
from placement.learning.policies.policy import Proposals
from placement.learning.policies.policy_file import PolicyOrigin, save_policy
from placement.results.result import versions

HELD_OUT_MODELS = ("nasnet_large", "nmt4", "transformer_moe", "gpt2")
HELD_OUT_CLUSTERS = ("8xV100-nvlink", "mixed-gpus", "8xK40-pcie", "2x8xH100-ib", "16xV100-10gbe")
MODELS = ("inception_v3", "resnet50", "rnnlm", "nmt2", "nmt8", "gnmt", "bert_base", "two_tower", "s2vt")
CLUSTERS = ("4xV100-pcie", "8xH100-nvswitch", "8xA100-nvswitch", "2xK40-pcie", "4xK40-pcie", "1xV100", "cpu-gpu")
HELD_OUT_SEEDS = 1_000_000  # generated graphs and random clusters from this seed on are for tests only
VALIDATION_SEEDS = 500_000
DEVICES = tuple(KNOWN[name] for name in ("K40", "P100", "T4", "V100_PCIE", "A100_PCIE", "H100"))
REWRITES = ("mb2", "mb4", "dp2", "dp4", "dp2 zero1", "tp2", "tp4", "dp2 | tp2", "recompute=kind:*bmm*", "updates=fused")
MOST_OPS = 8000  # of a graph
CLIP = 1.0
LEAST_GAIN = 0.03  # samples that differ by less than this hardly count
DRAWN = 15  # samples of a validation problem
WORST = 3.0  # an infeasible sample counts as this many times HEFT


class Task:
    """A problem to train on, its simulator, and HEFT's step time in seconds."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.problem = Problem(graph, cluster)
        self.simulator = Simulator(self.problem)
        plans = []
        for name in ("heft", "single_device", "m_etf"):
            try:
                plans.append(baselines.METHODS[name](self.problem, 0))
                break
            except InfeasibleError:
                continue
        if not plans:
            raise InfeasibleError(f"nothing fits for {graph.name} on {cluster.name}")
        score = self.simulator.score(plans[0])
        self.heft_s = max(min(score.step_time_s, self.simulator.score(Plan(plans[0].device)).step_time_s), 1e-12)

    def values(self, proposals: Proposals) -> FloatArray:
        """float64 [k], of HEFT's step time: the faster of a plan's own order and the default priority."""
        own = self.simulator.batch(proposals.device, orders=proposals.order)
        default = self.simulator.batch(proposals.device)
        times = [np.where(s.feasible, s.step_time_s / self.heft_s, WORST) for s in (own, default)]
        return np.minimum(*times)


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    policy = GraphPolicy() if options.start is None else load_pretrained(options.start)
    known = known_graphs(MODELS)
    print(f"{len(known)} graphs: " + ", ".join(f"{g.name} {g.n_ops}" for g in known), flush=True)
    validation = tasks(np.random.default_rng(VALIDATION_SEEDS), known, options.validation, VALIDATION_SEEDS)
    pool = np.array(tasks(rng, known, options.problems, 0), dtype=object)
    optimizer = _optimizer(policy)
    began, greedy, drawn = time.process_time(), *validate(policy, validation)
    best = math.sqrt(greedy * drawn)
    before = f"before training, of HEFT: greedy {greedy:.4f}, best of {DRAWN} {drawn:.4f}"
    print(f"{len(pool)} problems; {before}", flush=True)
    command = shlex.join(["python", "benchmarks/pretrain.py", *sys.argv[1:]])
    recent: list[tuple[float, float]] = []
    for update in range(1, options.updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / options.updates)))
        optimizer.zero_grad()
        chosen = rng.choice(pool, options.batch, replace=False)
        recent += [accumulate(policy, task, options.samples, generator, options.batch) for task in chosen]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        if update % options.every and update != options.updates:
            continue
        mean, least = np.exp(np.mean(recent, axis=0))
        recent.clear()
        greedy, drawn = validate(policy, validation)
        kept = math.sqrt(greedy * drawn) < best
        print(
            f"{update} {time.process_time() - began:.0f} s: samples {mean:.4f}, best {least:.4f}, noise "
            f"{policy.log_taste_noise.exp().mean():.3f}; validation: greedy {greedy:.4f}, best of {DRAWN} {drawn:.4f}"
            + (", kept" if kept else ""),
            flush=True,
        )
        if kept:
            best = math.sqrt(greedy * drawn)
            samples = update * options.batch * options.samples
            note = (
                f"Over many graphs and clusters; step times in validation, of HEFT's: greedy {greedy:.4f}, best of "
                f"{DRAWN} {drawn:.4f}."
            )
            origin = PolicyOrigin("default", False, options.seed, samples, (), (), versions(), command, note)
            save_policy(options.out, policy, origin)


def _optimizer(policy: GraphPolicy) -> torch.optim.AdamW:
    """The mean taste moves fast, what depends on the problem slowly."""
    slow = [policy.taste.weight, *policy.encode.parameters(), *policy.messages.parameters()]
    rates = [([policy.taste.bias], 1e-2), (slow, 2e-4), ([policy.log_taste_noise], 3e-3)]
    groups = [{"params": list(p), "lr": rate, "peak": rate, "weight_decay": 0.0} for p, rate in rates]
    groups[1]["weight_decay"] = 0.05  # a taste of its own is for problems that really differ
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))


def accumulate(
    policy: GraphPolicy, task: Task, samples: int, generator: torch.Generator, batch: int
) -> tuple[float, float]:
    """Add the policy gradient of one problem; returns mean and least log of the samples' values.

    A sample counts by how much faster than the mean it is, and the fastest of all more than others: what is wanted is
    a distribution whose best of a few is good.
    """
    proposals = policy.propose_by_taste(task.problem, samples, generator)
    values = np.log(task.values(proposals))
    gain = values.mean() - values
    if gain.max() > 1e-5:
        advantage = np.clip(gain / max(LEAST_GAIN, float(values.std())), -1.0, 3.0)
        log_density = policy.log_taste(task.problem, proposals.actions["taste"])
        loss = -(torch.from_numpy(advantage - advantage.mean()).float() * log_density).mean() / batch
        loss.backward()
    return float(values.mean()), float(values.min())


def validate(policy: GraphPolicy, chosen: list[Task]) -> tuple[float, float]:
    """Geometric means of step times, of HEFT's: of the greedy placements, and of the best of these and a few more."""
    generator = torch.Generator().manual_seed(0)
    logs = []
    for task in chosen:
        greedy = task.values(policy.propose(task.problem, 1, generator, greedy=True))[0]
        drawn = task.values(policy.propose(task.problem, DRAWN, generator))
        logs.append(np.log([greedy, min(greedy, drawn.min())]))
    means = np.exp(np.mean(logs, axis=0))
    return float(means[0]), float(means[1])


# -- problems ---------------------------------------------------------------------------------------------------


def known_graphs(models: tuple[str, ...]) -> list[OpGraph]:
    """Inference and training steps of zoo models, training steps of captured ones; but for those too large."""
    graphs = [model_graph(name, train) for name in models for train in (False, True)]
    graphs += [captured(name) for name in FOR_TRAINING]
    return [graph for graph in graphs if graph.n_ops <= MOST_OPS]


def tasks(rng: np.random.Generator, known: list[OpGraph], count: int, first_seed: int) -> list[Task]:
    """Problems that fit somewhere: half generated, half of known graphs, every other one of which is rewritten."""
    found: list[Task] = []
    number = first_seed
    while len(found) < count:
        number += 1
        cluster = _cluster(rng, number)
        graph = known[rng.integers(len(known))] if len(found) % 2 else generated(rng, number, cluster)
        if len(found) % 4 == 1:
            graph = rewritten(rng, graph, cluster)
        try:
            found.append(Task(graph, cluster))
        except InfeasibleError:
            continue
    return found


def _cluster(rng: np.random.Generator, number: int) -> Cluster:
    drawn = rng.random()
    if drawn < 0.3:
        return Cluster.preset(str(rng.choice(CLUSTERS)), rates="peak")
    return random_cluster(rng, number) if drawn < 0.8 else random_hosts(rng, number)


def rewritten(rng: np.random.Generator, graph: OpGraph, cluster: Cluster) -> OpGraph:
    """What a strategy makes of a training step, its collectives spelt out; else the graph itself."""
    try:
        found = applied(graph, cluster, Strategy.parse(str(rng.choice(REWRITES)))).problem.graph
    except (StrategyError, InfeasibleError):
        return graph
    return found if found.n_ops <= MOST_OPS else graph


def generated(rng: np.random.Generator, seed: int, cluster: Cluster) -> OpGraph:
    """A random graph of 30 to 800 ops whose transfers take 0.02 to 5 times its ops, over the reference link."""
    family = str(rng.choice(list(GENERATORS)))
    n_ops, ccr = (
        int(math.exp(rng.uniform(math.log(30), math.log(800)))),
        math.exp(rng.uniform(math.log(0.02), math.log(5))),
    )
    shape: dict[str, float] = {
        "layered": {"width": int(rng.integers(2, 33))},
        "fork_join": {"branches": int(rng.integers(2, 13))},
        "series_parallel": {"parallel": float(rng.uniform(0.2, 0.9))},
        "random_dag": {"degree": float(rng.uniform(1, 4))},
    }[family]
    kinds = [device.model for device in cluster.devices]
    uneven = float(rng.choice([0.0, 0.3, 1.0]))
    return GENERATORS[family](n_ops, seed, ccr, kinds=kinds, heterogeneity=uneven, **shape)


def random_cluster(rng: np.random.Generator, number: int) -> Cluster:
    """2 to 8 devices, alike or not, on one switch, two switches, or a mesh."""
    count = int(rng.integers(2, 9))
    alike = rng.random() < 0.6
    models = [
        DEVICES[k]
        for k in (np.full(count, rng.integers(len(DEVICES))) if alike else rng.integers(len(DEVICES), size=count))
    ]
    devices = tuple(_named(model, f"gpu{i}", rng) for i, model in enumerate(models))
    rate, latency_s = (
        math.exp(rng.uniform(math.log(2e9), math.log(400e9))),
        math.exp(rng.uniform(math.log(1e-6), math.log(2e-5))),
    )
    names = [device.name for device in devices]
    links: list[Link] = []
    shape = rng.choice(["switch", "switch", "two", "mesh"])
    if shape == "mesh":
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                links += both_ways(a, b, rate, latency_s)
    elif shape == "two" and count > 2:
        for i, name in enumerate(names):
            links += both_ways(name, f"switch{i % 2}", rate, latency_s / 2)
        links += both_ways("switch0", "switch1", rate * float(rng.uniform(0.2, 1.5)), latency_s / 2)
    else:
        for name in names:
            links += both_ways(name, "switch", rate, latency_s / 2)
    return Cluster(f"random-{number}", devices, tuple(links))


def random_hosts(rng: np.random.Generator, number: int) -> Cluster:
    """Eight hosts of eight devices alike: a switch in each, and one between the hosts."""
    model = DEVICES[rng.integers(len(DEVICES))]
    inside, between = math.exp(rng.uniform(math.log(1e10), math.log(4e11))), math.exp(rng.uniform(20.7, 24.6))
    devices, links = [], list[Link]()
    for host in range(8):
        links += both_ways(f"host{host}", "network", between, 5e-6)
        for i in range(8):
            device = _named(model, f"host{host}/gpu{i}", rng)
            devices.append(device)
            links += both_ways(device.name, f"host{host}", inside, 1e-6)
    return Cluster(f"hosts-{number}", tuple(devices), tuple(links))


def _named(model: Device, name: str, rng: np.random.Generator) -> Device:
    memory_bytes = int(model.memory_bytes if rng.random() < 0.8 else rng.uniform(2, 10) * GIB)
    return Device(
        name, model.kind, memory_bytes, model.peak_flops, model.memory_bytes_per_s, model.launch_overhead_s, model.model
    )


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--start", type=Path, help="a policy file to go on from (default: an untrained policy)")
    options.add_argument("--updates", type=int, default=1000, help="default: %(default)s")
    options.add_argument("--problems", type=int, default=1500, help="to train on (default: %(default)s)")
    options.add_argument("--validation", type=int, default=60, help="problems to choose by (default: %(default)s)")
    options.add_argument("--batch", type=int, default=16, help="problems an update (default: %(default)s)")
    options.add_argument("--samples", type=int, default=8, help="placements a problem (default: %(default)s)")
    options.add_argument("--every", type=int, default=50, help="updates between validations (default: %(default)s)")
    options.add_argument("--out", type=Path, default=PRETRAINED, help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
