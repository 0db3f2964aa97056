"""The answer of a search over strategies: its candidates, what it says beside them, and that it can be verified."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from training_steps import mlp

from baselines.budget import Budget
from baselines.strategies.searching import search
from baselines.strategies.searching.outcome import StrategyOutcome
from baselines.strategies.searching.records import Scored
from env.cluster import Cluster, Device, Link
from env.lanes import without_lanes
from graphs.errors import MismatchError
from graphs.formatting import format_bytes
from graphs.transforms.strategy import Strategy
from placement.comparing.methods import compare
from placement.optimization import optimize
from placement.results.advice import FIRST_LINE, advice, beside, in_two, ladder_rows, safer
from placement.results.alternatives import ONE_DEVICE, PLACEMENT, Alternative, best_of_each, front, listed, single_s
from placement.results.result import Result
from placement.solving import best_of_all as strategy_search
from placement.solving.compiling import compile_for_strategies
from placement.solving.solver import Solver
from placement.verification import verify

CLUSTER = Cluster.preset("8xA100-nvswitch", rates="peak")
FEW = 300  # evaluations
SLOW = replace(CLUSTER, links=tuple(replace(link, latency_s=1e6) for link in CLUSTER.links))
SMALL = replace(CLUSTER, devices=tuple(replace(d, memory_bytes=3000, reserved_bytes=0) for d in CLUSTER.devices))
TINY = replace(CLUSTER, devices=tuple(replace(d, memory_bytes=200, reserved_bytes=0) for d in CLUSTER.devices))


@pytest.fixture(scope="module")
def result() -> Result:
    """Of a training step that gains by being split."""
    return optimize(heavy(), CLUSTER, evaluations=FEW)


def heavy(batch: int = 8, layers: int = 2) -> Any:
    """The multilayer perceptron with so much work that links hardly count."""
    graph = mlp(batch=batch, layers=layers)
    return replace(graph, flops=graph.flops * 1e12)


def test_strategies_are_searched_by_default(result: Result) -> None:
    names = [one.name for one in result.alternatives]
    assert {ONE_DEVICE, PLACEMENT} < set(names)
    assert (result.method, result.chosen, not result.strategy.is_none) == ("auto", "strategy", True)
    times = [one.step_time_s for one in result.alternatives if one.step_time_s is not None]
    assert all(a <= b for a, b in pairwise(times))
    assert result.step_time_s == times[0] < single_s(result.alternatives)
    assert result.scope.startswith("among all strategies")


def test_it_saves_loads_and_verifies(result: Result) -> None:
    again = Result.from_json(result.to_json())
    assert again == result
    found = verify(again, heavy(), CLUSTER)
    assert found.problems == ()
    assert [sentence.partition(":")[0] for sentence in found.not_checked] == ["alternatives"]
    alone = verify(again)
    assert [s.partition(":")[0] for s in alone.not_checked] == ["lower_bound_s and gap", "alternatives", "the graph"]


def test_the_ladder_stands_beside_the_answer(result: Result) -> None:
    assert [rung.name for rung in result.ladder][:2] == ["replicas", "ZeRO"]
    rows = ladder_rows(result)
    same = [rung.name for rung in result.ladder if rung.strategy == result.strategy]
    steps = [rung.name for rung in result.ladder if rung.name not in same]
    assert [row.split("  ")[0] for row in rows] == [*steps, ", ".join([*same, "best"])]
    assert rows[1].endswith(("slower than the row above", "faster than the row above"))
    assert f"ladder       {rows[0]}" in result.summary()


def test_a_rung_that_is_the_answer_is_told_once(result: Result) -> None:
    again = replace(result, ladder=(replace(result.ladder[0], strategy=result.strategy), *result.ladder[1:2]))
    assert [row.split("  ")[0] for row in ladder_rows(again)] == ["ZeRO", "replicas, best"]


def test_the_best_strategy_stands_beside_a_step_that_no_trainer_runs(result: Result) -> None:
    assert "trainers" not in result.summary()
    placed = optimize(heavy(), CLUSTER, strategy="none", evaluations=FEW)
    step_s = placed.answered().objective_s
    ways = (("dp8 zero1", 1.5), ("tp8", 2.0))
    others = tuple(Alternative("", Strategy.parse(text), times * step_s, 100) for text, times in ways)
    told = replace(placed, alternatives=others).summary()
    assert "trainers     run nothing that is placed op by op; the fastest strategy that was found is dp8 zero1 " in told
    assert "50% slower" in told


def test_the_room_left_is_told(result: Result) -> None:
    device, peak = CLUSTER.devices[0], max(result.answered().peak_bytes.values())
    left = format_bytes(device.usable_bytes - peak)
    assert f"{format_bytes(device.reserved_bytes)} reserved, {left} left" in result.summary()


def test_a_safer_way_is_told_where_little_memory_is_left(result: Result) -> None:
    peak, step_s = max(result.answered().peak_bytes.values()), result.answered().objective_s
    less = Alternative("zero3", Strategy.parse("dp8 zero3"), 2 * step_s, peak // 2)
    more = replace(less, step_time_s=step_s, peak_bytes=int(0.95 * peak))
    assert safer(replace(result, alternatives=(more, less))) == ""  # devices of 80 GB
    devices = tuple(replace(d, memory_bytes=int(1.05 * peak), reserved_bytes=0) for d in result.cluster.devices)
    tight = replace(result, cluster=replace(result.cluster, devices=devices))
    told = f"plan 2 (dp8 zero3) needs {format_bytes(peak // 2)}, 100% slower"
    assert safer(replace(tight, alternatives=(more, less))) == told
    assert f"safer        {told}" in replace(tight, alternatives=(more, less)).summary()
    assert safer(replace(tight, alternatives=(more,))).startswith("nothing scored needs 10% less; --memory-fraction")


def test_the_answer_says_where_its_step_goes_and_why_the_next_is_slower(result: Result) -> None:
    assert "computing" in result.spent
    assert re.search(r"takes .* more: .*computing|takes as long", result.why)
    assert f"spent        {result.spent}\nwhy          {result.why}" in result.summary()


def test_the_same_seed_gives_the_same_answer(result: Result) -> None:
    assert optimize(heavy(), CLUSTER, evaluations=FEW) == result


def test_it_is_never_worse_than_a_placement_or_one_device() -> None:
    found = optimize(heavy(), SLOW, evaluations=FEW)
    assert (found.strategy, len(found.answered().used)) == (Strategy(), 1)
    assert advice(found).startswith("one device is best: ")
    assert re.search(r"^dp2 takes .* more: .*exposed over dp \(all-reduce .* over nvswitch\)", found.why)
    assert verify(found).holds


@pytest.mark.parametrize(
    "words",
    [{"strategy": "none"}, {"method": "heft"}, {"priority": "fifo"}, {"objective": "throughput"}],
)
def test_what_cannot_be_a_strategy_is_a_placement(words: dict[str, str]) -> None:
    found = optimize(heavy(), CLUSTER, evaluations=20, **words)  # type: ignore[arg-type]
    assert (found.strategy, found.alternatives) == (Strategy(), ())


def test_a_graph_without_rows_is_placed() -> None:
    assert optimize(replace(heavy(), split_rows=(), states=()), CLUSTER, evaluations=20).alternatives == ()


def test_no_budget_gives_a_quick_answer() -> None:
    found = optimize(heavy(), CLUSTER, budget_s=0)
    assert found.feasible
    assert found.budget_s == 0
    assert [one.name for one in found.alternatives].count(ONE_DEVICE) == 1


@pytest.mark.parametrize("limit", [{"evaluations": FEW}, {"budget_s": 60}])
def test_an_interrupted_search_returns_its_best(monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]) -> None:
    def stopped(*args: Any) -> StrategyOutcome:
        budget = next(arg for arg in args if isinstance(arg, Budget))
        os.kill(os.getpid(), signal.SIGINT)
        assert budget.interrupted
        one = Scored(Strategy.parse("dp8"), 1e-9, 100, 0)
        return StrategyOutcome(one, {"dp": one}, fitting=(one,), interrupted=True)

    monkeypatch.setattr(search, "search_strategies", stopped)
    found = optimize(heavy(), CLUSTER, **limit)  # type: ignore[arg-type]
    assert found.interrupted
    assert found.strategy.text == "dp8"
    assert "interrupted: the best found so far" in found.summary()


def test_ctrl_c_while_code_is_loaded_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = StrategyOutcome(None, {}, interrupted=True)  # of the small search that loads it
    with monkeypatch.context() as patched:
        patched.setattr(search, "search_strategies", lambda *args: ended)
        compile_for_strategies.cache_clear()
        with pytest.raises(KeyboardInterrupt):
            optimize(heavy(), CLUSTER)
    compile_for_strategies()  # other tests have it done


def test_an_interrupted_comparison_still_looks_at_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = Solver.solve

    def stopped(self: Solver, *asked: Any) -> Result:
        return replace(solve(self, *asked), interrupted=True)

    monkeypatch.setattr(Solver, "solve", stopped)
    found = compare(heavy(), CLUSTER, evaluations=FEW)
    assert len(found.results) == 1  # those that had not begun are left out
    assert found.overall is not None
    assert not found.overall.strategy.is_none


def test_no_evaluations_go_into_placements_that_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    quick: list[float | None] = []
    solve = Solver.solve_within

    def noted(self: Solver, method: str, budget: Budget, place: Any = None) -> Result:
        found = solve(self, method, Budget(0.0), place)
        if method == "auto":
            asked.append(budget.evaluations)
            quick.append(found.objective_s)
            found = replace(found, answer=None, reason="nothing") if len(asked) > 1 else found  # the second time
        return found

    monkeypatch.setattr(Solver, "solve_within", noted)
    assert not optimize(heavy(), CLUSTER, evaluations=2000).strategy.is_none
    assert asked == [100]  # which tells what there is to beat
    asked.clear(), quick.clear()
    found = optimize(heavy(), SLOW, evaluations=2000)
    assert found.strategy.is_none
    assert found.objective_s == quick[0]  # what was found quickly is not lost
    assert asked[-1] > 400  # all that is left, as no strategy is near


@pytest.mark.parametrize("limit", [{"budget_s": 20.0}, {"evaluations": 2000}])
def test_strategies_are_looked_at_as_long_as_there_is_time(limit: dict[str, Any]) -> None:
    asked: list[Budget] = []

    def noted(*args: Any) -> StrategyOutcome:
        asked.extend(arg for arg in args if isinstance(arg, Budget))
        one = Scored(Strategy.parse("dp8"), 1e-9, 100, 0)
        return StrategyOutcome(one, {"dp": one}, fitting=(one,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "search_strategies", noted)
        optimize(heavy(), CLUSTER, **limit)
    (budget,) = asked
    assert budget.seconds == (math.inf if "evaluations" in limit else pytest.approx(0.9 * 19, abs=2))
    assert budget.evaluations == (20 if "evaluations" in limit else math.inf)


@pytest.mark.parametrize("links_slower", [1, 10, 1e6])
def test_as_many_evaluations_find_nothing_better_without_strategies(links_slower: float) -> None:
    links = tuple(
        replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / links_slower) for each in CLUSTER.links
    )
    cluster, graph = replace(CLUSTER, links=links), mlp(batch=8, layers=3)
    found = optimize(graph, cluster, evaluations=FEW)
    alone = optimize(graph, cluster, strategy="none", evaluations=FEW)
    assert found.objective_s is not None
    assert alone.objective_s is not None
    assert found.objective_s <= alone.objective_s
    assert (found.evaluations or 0) <= FEW


def test_ctrl_c_ends_placing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))

    def nothing(*_: Any, **__: Any) -> StrategyOutcome:
        timer.start()
        return StrategyOutcome(None, {})

    monkeypatch.setattr(strategy_search, "find_strategies", nothing)
    found = optimize(heavy(layers=60), CLUSTER, budget_s=3600)
    assert found.interrupted
    assert found.strategy.is_none


def test_what_fits_only_as_a_strategy_is_found() -> None:
    """One device holds no third of it."""
    found = optimize(heavy(), SMALL, evaluations=10_000)
    assert found.feasible
    assert not found.strategy.is_none
    assert single_s(found.alternatives) is None
    assert "one device does not fit" in advice(found)
    assert "does not fit" in beside(found)[-1]


def test_the_answer_is_the_fastest_of_all_that_it_lists() -> None:
    """Also where that is one device, with the batch in parts because all of it does not fit."""
    devices = tuple(replace(d, memory_bytes=9000, reserved_bytes=0) for d in SLOW.devices[:2])
    found = optimize(heavy(64, 3), replace(SLOW, devices=devices, links=between(devices)), evaluations=10_000)
    assert found.strategy.text.startswith("mb")
    assert found.step_time_s == found.alternatives[0].step_time_s == single_s(found.alternatives)
    assert "one device does not fit" not in advice(found)


def test_what_several_devices_gain_is_told_against_a_strategy_on_one() -> None:
    """All of the batch at once fits on no device, its parts do."""
    devices = tuple(replace(d, memory_bytes=9000, reserved_bytes=0) for d in CLUSTER.devices)
    found = optimize(heavy(64, 3), replace(CLUSTER, devices=devices), evaluations=10_000)
    one_s = single_s(found.alternatives)
    assert one_s is not None
    assert found.step_time_s is not None
    assert one_s > found.step_time_s
    assert "; one device takes" in advice(found)
    assert " with mb" in advice(found)


def between(devices: tuple[Device, ...]) -> tuple[Link, ...]:
    """Links with a latency that no strategy can afford."""
    names = [device.name for device in devices]
    return tuple(Link(a, b, 1e9, 1e6) for a in names for b in names if a != b)


def test_one_device_has_strategies_too() -> None:
    """Its batch in parts fits where all of it at once does not."""
    device = replace(CLUSTER.devices[0], memory_bytes=9000, reserved_bytes=0)
    found = optimize(heavy(64, 3), Cluster("one", (device,), ()), evaluations=10_000)
    assert found.strategy.text.startswith("mb")
    assert found.summary().startswith(advice(found))
    plain = optimize(heavy(), Cluster("one", CLUSTER.devices[:1], ()), evaluations=FEW)
    assert advice(plain).startswith("one device is best: ")


def test_the_graph_as_it_is_on_one_device_is_listed_once() -> None:
    found = optimize(heavy(), SLOW, evaluations=FEW)
    assert {one.name for one in found.alternatives if one.strategy.is_none} == {ONE_DEVICE, PLACEMENT}
    assert "the graph as it is" not in advice(found)


def test_the_search_begins_with_statistics_of_the_whole_batch() -> None:
    graph = heavy()
    kinds = ("aten.native_batch_norm", *graph.kinds[1:])
    texts = [one.text for one in strategy_search.starts(replace(graph, kinds=kinds), CLUSTER)]
    assert texts[:2] == ["dp8 | statistics=sync", "dp8 zero1 | statistics=sync"]


def test_where_nothing_fits_the_most_frugal_strategy_says_what_it_lacks() -> None:
    found = optimize(heavy(), TINY, evaluations=FEW)
    assert not found.feasible
    assert found.reason.startswith("the most frugal strategy, '")
    assert "gpu0" in found.reason
    assert "lacks " in found.reason
    assert "fits on no number of devices like those of 8xA100-nvswitch up to 32: " in found.reason
    assert advice(found) == f"found nothing that fits: {found.reason}"
    assert Result.from_json(found.to_json()) == found


def test_progress_is_told() -> None:
    told: list[str] = []
    optimize(heavy(), CLUSTER, evaluations=FEW, progress=lambda what, done, of: told.append(what))
    assert told[-1] == "placing the graph as it is"
    assert any(what.startswith("scoring ") for what in told)


def test_a_large_graph_gets_more_time() -> None:
    assert strategy_search.default_budget_s(mlp()) == 10.0
    graph = type("Large", (), {"n_ops": 4108})
    assert strategy_search.default_budget_s(graph) == 41.0  # type: ignore[arg-type]
    graph.n_ops = 10**6
    assert strategy_search.default_budget_s(graph) == strategy_search.MOST_DEFAULT_S  # type: ignore[arg-type]


def test_lanes_can_be_taken_off_again() -> None:
    assert without_lanes(CLUSTER.with_lanes()) == CLUSTER


# -- the advice -----------------------------------------------------------------------------------------------


def test_the_first_line_is_the_advice(result: Result) -> None:
    first, second = result.summary().splitlines()[:2]
    whole, rest = advice(result), second.removeprefix("also         ") if second.startswith("also ") else first
    assert len(first) <= FIRST_LINE
    assert whole.startswith(first)
    assert whole.endswith(rest)
    assert "x one device" in first
    assert rest.endswith(f"one device takes {rest.rpartition('takes ')[2]}")


def test_the_first_line_says_that_the_one_device_beside_the_answer_is_the_host() -> None:
    cluster = Cluster.preset("8xA100-nvswitch+host", rates="peak")
    small = [replace(d, memory_bytes=9000, reserved_bytes=0) if d.kind == "gpu" else d for d in cluster.devices]
    first = optimize(heavy(64, 3), replace(cluster, devices=tuple(small)), evaluations=100).summary().splitlines()[0]
    assert "x one device (cpu0), " in first
    assert "x one device, " in optimize(heavy(64, 3), cluster, evaluations=100).summary().splitlines()[0]


def test_a_long_advice_is_a_first_line_and_the_rest() -> None:
    ways = [f"way {k} takes {k} ms" for k in range(12)]
    assert in_two("short") == ["short"]
    first, rest = in_two("; ".join(ways))
    assert len(first) <= FIRST_LINE
    assert f"{first}; {rest}" == "; ".join(ways)
    assert in_two("x" * 150) == ["x" * 150]


def test_one_device_is_named_where_devices_differ(result: Result) -> None:
    assert not any(one.device for one in result.alternatives)
    small = replace(CLUSTER.devices[1], memory_bytes=8000, reserved_bytes=0)
    devices = (CLUSTER.devices[0], small, *CLUSTER.devices[2:])
    found = optimize(heavy(), replace(CLUSTER, devices=devices), evaluations=FEW)
    assert [one.device for one in found.alternatives if one.name == ONE_DEVICE] == [devices[0].name]
    assert f" ({devices[0].name})" in advice(found)


def test_the_advice_leaves_out_what_is_far_slower(result: Result) -> None:
    answer_s = result.answered().objective_s
    one = Alternative(ONE_DEVICE, Strategy(), 8 * answer_s, 5)
    near, far = (
        Alternative(name, Strategy.parse(text), times * answer_s, 5)
        for name, text, times in (("tp", "tp2", 2), ("dp", "dp2", 5))
    )
    told = advice(replace(result, alternatives=listed([one, near, far])))
    assert "tensor parallel on 2 4.00x" in told
    assert "1.60x" not in told


def test_the_advice_leaves_out_what_makes_one_device_no_faster(result: Result) -> None:
    answer_s = result.answered().objective_s
    one = Alternative(ONE_DEVICE, Strategy(), 2 * answer_s, 5)
    as_fast, faster = (
        Alternative("one device, in micro-batches or recomputing", Strategy.parse(text), times * answer_s, 5)
        for text, times in (("statistics=sync", 1.99), ("mb2", 1.5))
    )
    assert "batch statistics" not in advice(replace(result, alternatives=listed([one, as_fast])))
    assert "1.33x" in advice(replace(result, alternatives=listed([one, faster])))


def ways(*rows: tuple[str, str, float | None, int | None]) -> tuple[Alternative, ...]:
    return listed(Alternative(name, Strategy.parse(text), *figures) for name, text, *figures in rows)


def test_the_front_is_what_nothing_beats_both_in_time_and_in_memory() -> None:
    found = ways(
        ("dp", "dp2", 2.0, 5), ("tp", "tp2", 1.0, 9), ("hybrid", "dp2 | tp2", 3.0, 5), (ONE_DEVICE, "none", None, None)
    )
    assert [one.strategy.text for one in front(found)] == ["tp2", "dp2"]
    assert found[-1].name == ONE_DEVICE


def test_the_best_of_each_is_the_fastest() -> None:
    found = ways(("dp", "dp2", 2.0, 5), ("dp", "dp4", 1.0, 5), ("tp", "tp2", 3.0, 5))
    assert [one.strategy.text for one in best_of_each(found)] == ["dp4", "tp2"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "dp"}, "has no 'strategy'; expected at least name, strategy, step_time_s, peak_bytes"),
        (5, "expected a list of objects"),
        ({"name": 1, "strategy": "", "step_time_s": 1, "peak_bytes": 1}, "has name = 1; expected a string"),
    ],
)
def test_alternatives_that_are_none_are_refused(result: Result, value: Any, message: str) -> None:
    document = {**json.loads(result.to_json()), "alternatives": [value]}
    with pytest.raises(MismatchError, match=message):
        Result.from_json(json.dumps(document))


def test_speedups_need_both_times() -> None:
    (one,) = ways(("dp", "dp2", 2.0, 5))
    assert (one.speedup(4.0), one.speedup(None)) == (2.0, None)
    assert math.isclose(ways(("dp", "dp2", 0.0, 5))[0].speedup(4.0) or 0.0, 1.0)


@pytest.mark.parametrize(
    ("way", "peaks"),
    [
        ({"strategy": "dp16"}, r"[\d.]+ kB on each of 16;.*"),
        ({"method": "round_robin"}, r"fullest host\d/gpu\d .*, emptiest host\d/gpu\d .*"),
    ],
)
def test_many_devices_are_summed_up(way: dict[str, Any], peaks: str) -> None:
    found = optimize(mlp(batch=16), Cluster.preset("2x8xH100-ib"), **way)
    (line,) = [line for line in found.summary().splitlines() if line.startswith("peak memory")]
    assert re.fullmatch(f"peak memory  {peaks}", line)


@pytest.mark.parametrize("cluster", [CLUSTER, SLOW, SMALL])
def test_the_same_seconds_give_the_same_answer(cluster: Cluster) -> None:
    """Also beside a thread that computes: seconds of a budget are work."""
    first = optimize(heavy(), cluster, budget_s=0.5)
    ended = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)])
    busy.start()
    second = optimize(heavy(), cluster, budget_s=0.5)
    ended.set()
    assert first == second


def test_an_answer_that_the_clock_has_ended_is_not_final() -> None:
    found = optimize(heavy(layers=40), CLUSTER, budget_s=3600, limit_s=1e-3)
    assert found.feasible
    assert found.interrupted
    assert found.limit_s == 1e-3
    assert not optimize(heavy(), CLUSTER, budget_s=0.2, limit_s=3600.0).interrupted
