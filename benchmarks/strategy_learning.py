"""Does learning help the search over strategies, at equal time, or at equal evaluations?

    python benchmarks/strategy_learning.py --seed 0 [--policy ppo] [--train-s 300] [--budget-s 10]
    python benchmarks/strategy_learning.py --seed 0 --policy graph --moves 2880 --evaluations 2,4,8 [--rows M@C,...]

A policy is trained for some minutes on ``placement/Strategy-v0``, on training steps of some models, by estimates:
MaskablePPO, or one of `placement.learning.strategies.policies`. Then three searches with the same budget look for
strategies of other models:

* the search without learning (`search_strategies`);
* the policy first, for a share of the time: episodes from one device and from random strategies, whose best by estimate
  are what the search begins with, for the rest of the time;
* moves by chance instead of the policy's, so that it shows what the policy has learned.

All answers are scored by the simulator. Training does not count as time of the search. With ``--evaluations`` each
search scores so many strategies, whatever time that takes, and proposals are free: what they take are estimates, some
hundreds beside the thousands of a search.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from table import Printer, parser

from baselines.budget import Budget
from baselines.strategies.searching.search import search_strategies
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from graphs.zoo.cache import model_graph
from placement.learning.strategies.environment import RANDOM, StrategyEnv
from placement.learning.strategies.policies import POLICIES
from placement.learning.strategies.reinforce import MASKS, StrategyLearner, odds_of, proposed
from placement.processes.threads import single_threaded

LEARNED_ON = ("alexnet", "inception_v3", "vit_b16", "bert_base", "rnnlm")
ASKED = ("gpt2", "resnet50", "nmt4", "transformer_moe")
CLUSTERS = ("8xH100-nvswitch", "4xV100-pcie", "16xV100-10gbe")
STEPS = 12
PROPOSING, EPISODES = 0.3, 32  # share of the time, and episodes at most
PROPOSED = 8  # strategies that the search begins with

Choose = Callable[[StrategyEnv, Any], int]


@dataclass(frozen=True)
class Row:
    """Seconds of the best strategy that each search has found for one task; infinite where none fits."""

    model: str
    cluster: str
    plain_s: float
    learned_s: float
    chance_s: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--policy", choices=("ppo", *POLICIES), default="ppo", help="what is trained (default: %(default)s)"
    )
    options.add_argument("--moves", type=int, help="moves of training, instead of seconds; not for ppo")
    options.add_argument("--evaluations", default="", help="strategies that each search scores, instead of seconds")
    options.add_argument("--rows", default="", help="model@cluster,... (default: all)")
    options.add_argument("--train-s", type=float, default=300.0, help="seconds of training (default: %(default)s)")
    options.add_argument("--budget-s", type=float, default=10.0, help="seconds of each search (default: %(default)s)")
    given = options.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    by_policy, learning = _trained_ppo(given) if given.policy == "ppo" else _trained(given)
    _found_s(
        model_graph(LEARNED_ON[0], train=True),
        Cluster.preset(CLUSTERS[0], rates="peak"),
        given.seed,
        Budget(evaluations=1),
    )  # compiles
    rng = np.random.default_rng(given.seed)

    def by_chance(env: StrategyEnv, observation: Any) -> int:
        return int(rng.choice(np.flatnonzero(env.action_masks())))

    named = given.rows.split(",") if given.rows else [f"{model}@{name}" for model in ASKED for name in CLUSTERS]
    tasks = [
        (model, name, model_graph(model, train=True), Cluster.preset(name, rates="peak"))
        for model, name in (one.split("@") for one in named)
    ]
    show = Printer("Learning and the search over strategies", given.markdown)
    print(learning)
    for limit in _limits(given):
        rows = []
        for model, name, graph, cluster in tasks:
            alone_s = _found_s(graph, cluster, given.seed, limit.budget())
            others = (_proposing_s(graph, cluster, given.seed, limit, choose) for choose in (by_policy, by_chance))
            rows.append(Row(model, name, alone_s, *others))
        show.table(
            f"Best step time found {limit}",
            ["model", "cluster", "search alone", "policy, then search", "chance, then search", "policy against search"],
            [_words(row) for row in rows],
        )
        print(_verdict(rows))


@dataclass(frozen=True)
class Limit:
    """Of a search: seconds, or strategies that it scores; the other one is infinite."""

    seconds: float = math.inf
    evaluations: float = math.inf

    def budget(self) -> Budget:
        return Budget(self.seconds, self.evaluations)

    def __str__(self) -> str:
        by_time = f"in {self.seconds:g} s"
        return by_time if math.isinf(self.evaluations) else f"by scoring {self.evaluations:g} strategies"


def _limits(given: argparse.Namespace) -> list[Limit]:
    counts = [Limit(evaluations=int(word)) for word in given.evaluations.split(",") if word]
    return counts or [Limit(given.budget_s)]


def _learned_on() -> StrategyEnv:
    graphs = [model_graph(name, train=True) for name in LEARNED_ON]
    return StrategyEnv(graphs, [Cluster.preset(name, rates="peak") for name in CLUSTERS], STEPS, masks=MASKS)


def _trained(given: argparse.Namespace) -> tuple[Choose, str]:
    """A policy of the package, and how its episodes went."""
    learner, until_s = StrategyLearner(_learned_on(), given.policy, given.seed), time.monotonic() + given.train_s
    with single_threaded():
        while time.monotonic() < until_s if given.moves is None else learner.samples < given.moves:
            learner.update()
    generator = torch.Generator().manual_seed(given.seed)

    def choose(env: StrategyEnv, observation: Any) -> int:
        with torch.no_grad():
            return int(torch.multinomial(odds_of(learner.policy, env, observation).exp(), 1, generator=generator))

    return choose, _told(given, learner.samples, learner.returns)


def _trained_ppo(given: argparse.Namespace) -> tuple[Choose, str]:
    """MaskablePPO, and how its episodes went."""
    env = _learned_on()
    agent = MaskablePPO("MlpPolicy", env, n_steps=256, batch_size=128, gamma=1.0, ent_coef=0.01, seed=given.seed)
    until = _Until(time.monotonic() + given.train_s)
    agent.learn(10**9, callback=until)

    def choose(env: StrategyEnv, observation: Any) -> int:
        return int(agent.predict(observation, action_masks=env.action_masks())[0])

    return choose, _told(given, agent.num_timesteps, until.returns)


def _told(given: argparse.Namespace, moves: int, returns: Sequence[float]) -> str:
    """How episodes went at the beginning and at the end."""
    part = max(1, len(returns) // 5)
    first, last = (float(np.exp(np.mean(some))) if some else 1.0 for some in (returns[:part], returns[-part:]))
    words = (
        f"{given.policy} was trained for {moves:,} moves, {len(returns):,} episodes of {STEPS}.",
        f"One made the step {first:.2f}x as fast as on one device in the first fifth of them, {last:.2f}x in the last",
        "(geometric mean; a step that does not fit counts as slower).",
    )
    return " ".join(words)


class _Until(BaseCallback):
    """Ends training at a time, and keeps the returns of episodes."""

    def __init__(self, end_s: float) -> None:
        super().__init__()
        self.end_s, self.returns = end_s, list[float]()

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return time.monotonic() < self.end_s


def _found_s(graph: OpGraph, cluster: Cluster, seed: int, budget: Budget, starts: tuple[Strategy, ...] = ()) -> float:
    best = search_strategies(graph, cluster, seed, budget, starts=starts).best
    return float("inf") if best is None else best.step_time_s


def _proposing_s(graph: OpGraph, cluster: Cluster, seed: int, limit: Limit, choose: Choose) -> float:
    """Episodes first, and then a search from the best strategies that they came to."""
    budget = limit.budget()
    part = budget.part(PROPOSING)
    env = StrategyEnv(graph, cluster, STEPS, masks=MASKS)
    env.reset(seed=seed)
    for episode in range(EPISODES):
        observation, _ = env.reset(options={"start": RANDOM if episode % 2 else "none"})
        for _ in range(STEPS):
            if part.over():
                break
            observation = env.step(choose(env, observation))[0]
    return _found_s(graph, cluster, seed, budget, tuple(proposed(env.task, PROPOSED)))


def _words(row: Row) -> list[str]:
    times = [f"{seconds * 1e3:.2f} ms" for seconds in (row.plain_s, row.learned_s, row.chance_s)]
    return [row.model, row.cluster, *times, f"{row.plain_s / row.learned_s:.3f}x"]


def _verdict(rows: list[Row]) -> str:
    """One sentence: wins, losses, and the median."""
    ratio = np.array([row.plain_s / row.learned_s for row in rows])
    chance = np.array([row.plain_s / row.chance_s for row in rows])
    counts = [int((some > 1.001).sum()) for some in (ratio, 1 / ratio, ratio / chance, chance / ratio)]
    return (
        f"With the policy the search finds a faster step in {counts[0]} of {len(rows)} rows and a slower one in "
        f"{counts[1]}, {np.median(ratio):.3f}x as fast in the median. Beside moves by chance the policy is better in "
        f"{counts[2]} and worse in {counts[3]}."
    )


if __name__ == "__main__":
    main()
