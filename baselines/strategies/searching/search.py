"""`search_strategies`: the best strategies of a graph on a cluster.

Estimates first: a few options of every mesh, then hill climbing from the best meshes, then the grid that people try by
hand, all by `Estimator`. The best are scored by the simulator, and what it says of them corrects the estimates of their
like; neighbours of the best follow, until none of them promises to be better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from baselines import prices
from baselines.budget import Budget
from baselines.strategies.allowed import FLUSHING
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.beyond import look_beyond
from baselines.strategies.searching.families import HYBRID, family_of
from baselines.strategies.searching.grid import hand_grid
from baselines.strategies.searching.ladder import first_rungs, ladder_of
from baselines.strategies.searching.moves import neighbours
from baselines.strategies.searching.outcome import StrategyOutcome, fastest_first, outcome_of
from baselines.strategies.searching.patterns import patterns
from baselines.strategies.searching.records import (
    ANY_TOOL,
    Pool,
    Rival,
    Scored,
    ScoreMany,
    ToolLimits,
    Tried,
    like,
    shape_of,
)
from baselines.strategies.searching.replicas import placed_replicas, score_placed
from baselines.strategies.searching.saving import savings
from baselines.strategies.searching.scoring import scoring_s, tried
from baselines.strategies.searching.settings import DEFAULTS
from baselines.strategies.searching.space import Space, frugal_strategies, offloads, sharded
from env.cluster import Cluster
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.axes import STORAGE_AXES
from graphs.transforms.strategy import Strategy

Progress = Callable[[str, int, int], None]  # what is done, how many are, of how many

NO_RIVAL = Rival()


def search_strategies(
    graph: OpGraph,
    cluster: Cluster,
    budget: Budget,
    progress: Progress | None = None,
    starts: Iterable[Strategy] = (),
    score_many: ScoreMany | None = None,
    rival: Rival = NO_RIVAL,
    tool: ToolLimits = ANY_TOOL,
) -> StrategyOutcome:
    """Find the best strategies; within the same budget the outcome is always the same.

    Args:
        budget: strategies scored by the simulator count as evaluations. At least one is scored, whatever the budget,
            unless all are far behind the rival.
        progress: called before each strategy that is scored, and before each part of the search.
        starts: strategies to begin with, e.g. those that a policy proposes.
        score_many: scores `SearchSettings.batch` strategies side by side, by workers; None: one after the other, here.
        rival: what there is without strategies; where none promises to come near it, the search ends after a part of
            its time. The user's own strategies are scored before all others.
        tool: limits of what runs the answer; a few strategies that a named one cannot run are scored beyond the
            evaluations.
    """
    search = _Search(graph, cluster, budget, progress, score_many, rival, tool)
    try:
        search.run(tuple(starts))
    except KeyboardInterrupt:
        if budget.interrupted:
            raise  # asked twice: leave at once
        budget.interrupted = True
    for family in [*search.pool.unwritten]:  # it is not lost where the plainest that nobody has asked for is run
        unasked = [one for one in search.pool.estimates.values() if family_of(one.strategy) == family]
        plainest = min(unasked, key=lambda one: (one.strategy.micro_batches, one.step_time_s), default=None)
        if plainest is not None and tool.refuses(plainest.strategy) is None:
            del search.pool.unwritten[family]
    return outcome_of(search.pool, budget.interrupted)


def _first_of_each(
    estimates: Iterable[Estimate], kind_of: Callable[[Strategy], object], known: Iterable[Estimate]
) -> list[Estimate]:
    """The first strategy of each kind, but for kinds of which one is known."""
    firsts = {kind_of(estimate.strategy): estimate for estimate in known}
    n = len(firsts)
    for estimate in estimates:
        firsts.setdefault(kind_of(estimate.strategy), estimate)
    return list(firsts.values())[n:]


def _competes(strategy: Strategy) -> bool:
    """Whether it may stand beside placements: on several devices, or one with its host."""
    return strategy.devices > 1 or bool(strategy.offload)


def _devices_of(strategy: Strategy) -> object:
    """Names of the devices that a strategy uses, or their number."""
    return strategy.device_names or strategy.devices


def _kind_of(strategy: Strategy) -> object:
    """Whether it has stages, and gathers parameters: on slow networks estimates of the one are off unlike the other."""
    return strategy.stages > 1, strategy.zero >= 2


def _exchanges_of(strategy: Strategy) -> object:
    """Mesh and stages, and whether large sums of gradients hold up statistics, which an estimate makes too much of."""
    return shape_of(strategy), strategy.statistics == "sync" and strategy.bucket_bytes > Strategy.bucket_bytes


class _Search:
    """One search and what it has found so far."""

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        budget: Budget,
        progress: Progress | None,
        score_many: ScoreMany | None,
        rival: Rival,
        tool: ToolLimits,
    ) -> None:
        self.settings, self.tool = DEFAULTS, tool
        self.kept_s = DEFAULTS.beyond_share * budget.left_s() if tool.name else 0.0  # for the end
        self.estimate_s = prices.estimate_s(graph)
        self.rival, self.share = rival, 1.0
        self.is_whole = False  # whether all that was to be estimated so far was
        self.score_many = score_many
        self.graph, self.cluster, self.budget = graph, cluster, budget
        self.space, self.estimator, self.pool = Space(graph, cluster), Estimator(graph, cluster), Pool()
        self.progress = progress or (lambda text, done, total: None)
        self.capacity = max((cluster.devices[d].usable_bytes for d in cluster.compute_devices.tolist()), default=1)
        self.all_s = self._time_s()  # which parts of the search share
        self.most_estimates = min(DEFAULTS.most_estimates, DEFAULTS.estimates_each * budget.evaluations)
        self.own_s = (1 - rival.share) * self.all_s  # what is left of it for strategies
        self.explored: set[Strategy] = set()  # whose neighbours were estimated
        self.starts: set[Strategy] = set()
        self.by_hand: set[Strategy] = set()  # the hand grid
        self.scored_estimates_s: set[float] = set()  # of scored strategies
        self.fits = False  # whether any estimate does

    def run(self, starts: tuple[Strategy, ...]) -> None:
        """All parts, one after the other."""
        self.progress("estimating meshes", 0, 4)
        self.starts = set(starts)
        self._estimate_all((*self.rival.own, *starts), "sketch", least=len(self.rival.own) + len(starts))
        self.is_whole = self._estimate_all(self._sketches(), "sketch", least=1, enough=self._is_hopeless)
        for frugal in frugal_strategies(self.graph, self.space.n_devices):
            ways = [replace(frugal, offload=names) for names in offloads(self.graph, self.cluster, frugal)]
            if self.fits or not self._estimate_all(ways, "climb", least=len(self.pool.estimates) + len(ways)):
                break
        self._estimate_all(first_rungs(self.space), "climb")
        self.progress("climbing", 1, 4)
        self._climb()
        self.progress("estimating the grid", 2, 4)
        self.is_whole = self._estimate_all(self._best_meshes_first(), "grid")
        self.progress("scoring", 3, 4)
        placed = self._placed_replicas()
        self._score_best()
        rungs = [rung for rung in ladder_of(self.pool).values() if isinstance(rung, Estimate)]
        while not self._is_over() and (due := self._affordable(rungs)):
            self._score(due)
        allowed = min(self.budget.left_s(), self.settings.placed_share * self.all_s)
        score_placed(self.space, self.pool, placed, self.budget, allowed, self.progress)
        if self.tool.name:
            self.progress("looking beyond", 4, 4)
            look_beyond(self.pool, self.budget, self.kept_s, self.estimator, self._tried, self._scoring_s)

    # -- estimating -------------------------------------------------------------------------------------------

    def _time_s(self) -> float:
        """Seconds left, but for those that are kept for the end."""
        return max(0.0, self.budget.left_s() - (0.0 if math.isinf(self.kept_s) else self.kept_s))

    def _estimate(self, strategy: Strategy) -> Estimate | None:
        pool = self.pool
        if strategy in pool.estimates:
            return pool.estimates[strategy]
        if strategy in pool.refused or strategy in pool.lacking:
            return None
        if lacking := self.tool.lacks(strategy):
            pool.lacking[strategy] = lacking
            return None
        self.budget.spend(0, self.estimate_s)
        try:
            found = self.estimator.estimate(strategy)
        except StrategyError as error:
            pool.refused[strategy] = str(error)
            return None
        pool.estimates[strategy] = found
        self.fits |= found.fits
        return found

    def _is_time(self, part: str) -> bool:
        """Whether a part of the estimating may go on."""
        if self.budget.interrupted or len(self.pool.estimates) >= self.most_estimates:
            return False
        end_share: float = getattr(self.settings, f"{part}_share")
        return math.isinf(self.all_s) or self._time_s() > self.all_s - self.share * end_share * self.own_s

    def _look_at_rival(self) -> None:
        """Take a part of the time only, while what fits is estimated to be slower than the rival; less the slower."""
        behind = self._behind()
        # Where not every mesh was looked at, the best may not have been, and what was must be far slower.
        is_behind = behind > (1 if self.is_whole else self.settings.far_behind)
        self.share = self.settings.behind_share / min(behind, self.settings.most_behind) if is_behind else 1.0

    def _behind(self) -> float:
        """Step time of the fastest that is estimated to fit, times the rival's."""
        fitting = (self.pool.corrected_s(e) for e in self.pool.estimates.values() if e.fits and _competes(e.strategy))
        return min(fitting, default=math.inf) / self.rival.known_s

    def _is_hopeless(self) -> bool:
        """Whether nothing comes near the rival, of the meshes along one axis at least, which are the first."""
        return len(self.pool.estimates) >= self.settings.enough and self._is_far_behind()

    def _is_far_behind(self) -> bool:
        return self._behind() > self.settings.hopeless

    def _estimate_all(
        self, strategies: Iterable[Strategy], part: str, least: int = 0, enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """Estimate strategies while there is time, until `enough`, at least so many; returns whether all were."""
        for strategy in strategies:
            if (enough() or not self._is_time(part)) and len(self.pool.estimates) >= least:
                return False
            self._estimate(strategy)
        return True

    def _best_meshes_first(self) -> list[Strategy]:
        """The hand grid, in the order of what was estimated of each mesh so far."""
        best: dict[object, int] = {}
        for place, estimate in enumerate(self._ranked()):
            best.setdefault(shape_of(estimate.strategy), place)
        self.by_hand = set(grid := list(hand_grid(self.graph, self.cluster)))
        return sorted(grid, key=lambda strategy: best.get(shape_of(strategy), len(self.pool.estimates)))

    def _sketches(self) -> Iterator[Strategy]:
        """A few options of every mesh: what saves memory follows only where the plain one does not fit."""
        space = self.space
        for sizes, stages in space.meshes():
            parts = sizes.get("dp", 1)
            micro = space.micro_batches(parts)
            some = {micro[0], micro[-1], micro[len(micro) // 2]} if stages > 1 else {micro[0]}
            ways = (True, False) if sizes.get("tp", 1) > 1 and space.has_sequence else (False,)
            for m in sorted(some):
                for sequence in ways:
                    plain = space.strategy(sizes, stages, sequence, micro_batches=m)
                    yield from self._frugal(plain)
                    if plain in self.pool.refused and stages > 1 and m > 1:  # the loss may be one of the whole batch
                        yield from self._frugal(replace(plain, order=FLUSHING))
        if 1 < space.n_devices <= space.limit("dp"):  # replicas that cut the weights of one block
            plain = space.strategy({"dp": space.n_devices})
            for modules in patterns(self.graph).weights:
                yield replace(plain, mesh=(replace(plain.mesh[0], tensor_modules=modules),))

    def _frugal(self, plain: Strategy) -> Iterator[Strategy]:
        """More and more frugal forms of a strategy, until one fits."""
        can_split = any(rule.name in STORAGE_AXES for rule in plain.mesh)
        levels = (0, 1, 3) if can_split and self.graph.is_training else (0,)
        more, parts = self.space.recomputations, patterns(self.graph).most_parts
        steps = savings(self.graph, self.cluster).steps[1:4:2]  # those that keep most, and about a third
        again = (*more[:-1], *steps, *([parts] if parts else []), *self.tool.recomputed, *more[-1:])
        on_hosts = offloads(self.graph, self.cluster, plain)
        for offload, recompute, zero in itertools.product(on_hosts, again, levels):
            for frugal in sharded(self.cluster, replace(plain, recompute=recompute, offload=offload), zero):
                if not self.space.may_fit(frugal) or (frugal.offloads_parameters and zero == 1):
                    continue
                yield frugal
                if frugal in self.pool.lacking:
                    continue
                found = self.pool.estimates.get(frugal)
                if found is None or found.fits:
                    return

    def _climb(self) -> None:
        """Hill climbing by estimates from the best of several meshes."""
        best_of: dict[object, Estimate] = {}
        for estimate in self._ranked():
            best_of.setdefault((estimate.strategy.mesh, estimate.strategy.stages), estimate)
        for start in list(best_of.values())[: self.settings.climbs]:
            self._look_at_rival()
            here = start
            for _ in range(self.settings.most_steps):
                near = []
                for _, strategy in neighbours(self.graph, self.cluster, here.strategy):
                    if not self._is_time("climb"):
                        return
                    found = self._estimate(strategy)
                    if found is not None:
                        near.append(found)
                best = min(near, key=self._rank, default=here)
                if self._rank(best) >= self._rank(here):
                    break
                here = best

    def _rank(self, estimate: Estimate) -> tuple[int, float, int]:
        """Key that sorts those that fit first, then those that may, by time or missing memory, the shorter text first.

        While nothing that fits is known, strategies that lack least memory come first: others that fit are near them.
        """
        fits = self.pool.promises_to_fit(estimate, self.capacity)
        lacks = 0 if fits else 1 if estimate.missing_bytes <= self.settings.near_memory * self.capacity else 2
        if self.pool.tried_in_vain.get(like(estimate.strategy), 0) >= self.settings.most_in_vain:
            lacks = 3
        is_timed = lacks == 0 or (lacks == 1 and self.fits)
        time_s = self.pool.corrected_s(estimate) if is_timed else float(estimate.missing_bytes)
        return lacks, float(f"{time_s:.6e}"), len(estimate.strategy.text)

    def _ranked(self) -> list[Estimate]:
        return sorted(self.pool.estimates.values(), key=self._rank)

    # -- scoring ----------------------------------------------------------------------------------------------

    def _score_best(self) -> None:
        """Score the most promising, in turn with the best of each family, until nothing promises to be better."""
        families, without, is_second = self._best_of_families(), 0, False
        self._score([self.pool.estimates[each] for each in self.rival.own if each in self.pool.estimates])
        self._look_at_rival()
        self._score(self._affordable(families[:2]))  # the best, and the best that people try
        while not self._is_over():
            self._look_at_rival()
            due = self._affordable(families)
            self._score(due)
            promising = self._affordable(self._promising()) if without < self.settings.patience else []
            if not promising and not due:
                if is_second:
                    return
                # Strategies estimated on the way may be better than a family's best at the beginning.
                families, is_second = self._best_of_families(), True
            if promising and not self._is_over():
                without = 0 if self._score(promising) else without + len(promising)

    def _promising(self) -> list[Estimate]:
        """Estimates to score next: the best ones, the neighbours of the best strategy so far included."""
        best = self._best()
        if best is not None and best.strategy not in self.explored:
            self.explored.add(best.strategy)
            if self.space.has_launches and best.strategy.places > 1:
                self._estimate(replace(best.strategy, fused_updates=not best.strategy.fused_updates))
            for again in self.tool.recomputed:
                self._estimate(replace(best.strategy, recompute=again))
            for _, strategy in neighbours(self.graph, self.cluster, best.strategy):
                if self._is_over():
                    return []
                self._estimate(strategy)
        limit_s = math.inf if best is None else best.step_time_s * self.settings.slack
        left = (e for e in self._ranked() if e.strategy not in self.pool.scored and self._rank(e)[0] < 2)
        promising = [e for e in left if self.pool.corrected_s(e) <= limit_s]
        # A strategy estimated to take as long as one that was scored is hardly better than that.
        new: dict[float, Estimate] = {}
        for estimate in promising:
            if estimate.step_time_s not in self.scored_estimates_s:
                new.setdefault(estimate.step_time_s, estimate)
        return list(new.values() or promising)[: self.settings.batch]

    def _affordable(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """A round of them: the first that are open, together a part of the budget, unless it is one alone.

        There has to be an answer, whatever the budget, if only the rival's.
        """
        is_needed = self._best() is None and not self._is_far_behind()
        left_s, left, taken = self._left_s(), self.budget.evaluations_left(), list[Estimate]()
        round_s, most = self.settings.round_share * left_s, min(self.settings.batch, self.settings.round_share * left)
        for estimate in estimates:
            if not self._is_open(estimate.strategy):
                continue
            own_s = self._scoring_s(estimate)
            if taken and (own_s > round_s or len(taken) + 1 > most):
                break
            if is_needed or (own_s < left_s and left >= 1):
                taken.append(estimate)
                round_s -= own_s
        return taken

    def _left_s(self) -> float:
        """Seconds left for strategies; all that there are, once one of them has beaten the rival."""
        best = self._best()
        if math.isinf(self.all_s) or (best is not None and self._is_beaten(best.step_time_s)):
            return self._time_s()
        return self._time_s() - (self.all_s - self.share * self.own_s)

    def _best_of_families(self) -> list[Estimate]:
        """The most promising one, also of the hand grid, of each set of devices of `starts`, near kind, mesh, family.

        Estimates of one mesh are off alike, those of two meshes are not.
        """
        ranked = [estimate for estimate in self._ranked() if self._rank(estimate)[0] < 2] or self._ranked()[:1]
        by_hand = (e for e in ranked if e.strategy in self.by_hand and e.strategy.devices > 1)
        result = [*ranked[:1], *itertools.islice(by_hand, 1)]
        result += _first_of_each([e for e in ranked if e.strategy in self.starts], _devices_of, result)
        limit_s = self.settings.slack * self.pool.corrected_s(result[0]) if result else 0.0
        near = [estimate for estimate in ranked if self.pool.corrected_s(estimate) <= limit_s]
        result += _first_of_each(near, _kind_of, result)
        result += _first_of_each(near, _exchanges_of, result)
        result += _first_of_each([e for e in ranked if family_of(e.strategy) != HYBRID], family_of, result)
        return list(dict.fromkeys(result))

    def _scoring_s(self, estimate: Estimate) -> float:
        """Seconds of work in scoring it."""
        return scoring_s(self.graph, self.cluster, estimate.strategy)

    def _placed_replicas(self) -> list[Strategy]:
        """Strategies that place every part of a mesh, for which time is kept; none for a named tool: none runs them."""
        if self.tool.name or self.budget.over():
            return []
        fitting = (self.pool.corrected_s(each) for each in self.pool.estimates.values() if each.fits)
        best_s = min([self.rival.known_s, *fitting])
        found = placed_replicas(self.space, self.pool, self._estimate, self.rival, best_s)
        found = [one for one in found if not self.tool.lacks(one)]
        if found and not math.isinf(self.all_s):
            self.kept_s = self.settings.placed_share * self.all_s
        return found

    def _is_open(self, strategy: Strategy) -> bool:
        pool = self.pool
        return strategy not in pool.scored and strategy not in pool.refused and strategy not in pool.lacking

    def _is_over(self) -> bool:
        return (self.budget.over() or self._left_s() <= 0) and (bool(self.pool.scored) or self._is_far_behind())

    def _score(self, estimates: Sequence[Estimate]) -> bool:
        """Score strategies that the tool runs; returns whether one of them is the best so far."""
        estimates = [estimate for estimate in estimates if self._is_run(estimate)]
        if not estimates:
            return False
        self.budget.spend(len(estimates), sum(map(self._scoring_s, estimates)))
        found = self._tried([estimate.strategy for estimate in estimates])
        gains = [self._learn(estimate, each) for estimate, each in zip(estimates, found, strict=False)]
        return any(gains)

    def _tried(self, strategies: Sequence[Strategy]) -> Iterator[Tried]:
        """The score of each; here one after the other, until the user or the clock ends the search."""
        self.progress(f"scoring {strategies[0]}", len(self.pool.scored), len(self.pool.estimates))
        if self.score_many is not None:
            yield from self.score_many(strategies)
            return
        for number, strategy in enumerate(strategies):
            if number:
                if self.budget.interrupted or self.budget.limit.is_over():
                    return
                self.progress(f"scoring {strategy}", len(self.pool.scored), len(self.pool.estimates))
            yield tried(self.graph, self.cluster, strategy)

    def _is_run(self, estimate: Estimate) -> bool:
        """Whether the tool runs a strategy; else what it takes instead is estimated."""
        strategy, pool = estimate.strategy, self.pool
        refusal = self.tool.refuses(strategy)
        if refusal is None:
            return True
        pool.lacking[strategy] = refusal.reason
        del pool.estimates[strategy]
        if refusal.instead is None or self._estimate(refusal.instead) is None:
            pool.unwritten.setdefault(family_of(strategy), refusal.reason)
            self._try_in_vain(strategy)
        return False

    def _try_in_vain(self, strategy: Strategy) -> None:
        """Note that a strategy promised what it does not keep."""
        self.pool.tried_in_vain[like(strategy)] = self.pool.tried_in_vain.get(like(strategy), 0) + 1

    def _learn(self, estimate: Estimate, found: Tried) -> bool:
        """Note the outcome of a strategy; returns whether it is the best so far."""
        strategy = estimate.strategy
        if found.scored is None:
            self.pool.refused[strategy] = found.reason
            del self.pool.estimates[strategy]
            self._try_in_vain(strategy)
            return False
        best = self._best()
        is_gain = found.scored.fits and (best is None or found.scored.step_time_s < best.step_time_s)
        self.pool.scored[strategy] = found.scored
        self.scored_estimates_s.add(estimate.step_time_s)
        self.pool.learn(estimate, found.scored, is_gain)
        return is_gain

    def _is_beaten(self, step_time_s: float) -> bool:
        return self.rival.is_beaten_by(step_time_s, self.settings.beaten)

    def _best(self) -> Scored | None:
        return next(iter(fastest_first(self.pool)), None)
