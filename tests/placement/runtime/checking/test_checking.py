"""Before a strategy is advised it is written, and what its parts make is compared with what the whole call makes."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from env.cluster import Cluster
from graphs.capture import capture
from graphs.capture.rows.letters import Letter, aligned
from graphs.capture.rows.rules import RULES
from graphs.capture.trace import Layout, TensorInfo, row_major
from graphs.errors import InfeasibleError
from graphs.files import load_graph, save_graph
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, keep_step, step_of
from graphs.transforms.strategy import Strategy
from placement.comparing.strategies import compare_strategies
from placement.optimization import optimize
from placement.runtime.checking.check import check
from placement.runtime.checking.smaller_calls import candidates
from placement.runtime.checking.strategy_check import verdicts
from placement.runtime.checking.uses import ReadPart, Use, UsePart
from placement.runtime.checking.verdicts import DIFFERS, NOT_COMPUTED, SAME, verdict
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.solving.strategy_row import strategy_row

CLUSTER = Cluster.preset("4xV100-pcie")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path))
    return tmp_path


# -- one use -----------------------------------------------------------------------------------------------------------


def use(
    target: Any, shapes: Sequence[tuple[int, ...]], made: tuple[int, ...], *args: Any
) -> tuple[fx.Node, list[fx.Node]]:
    """A call of tensors and further arguments, with one result."""
    graph = fx.Graph()
    nodes = []
    for shape in shapes:
        nodes.append(graph.placeholder("x"))
        nodes[-1].meta["info"] = _info(shape)
    node = graph.call_function(target, (*nodes, *args))
    node.meta["info"] = _info(made)
    return node, nodes


def _info(shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(Layout(shape, row_major(shape), torch.float32), 0, 0)


@pytest.mark.parametrize(("target", "expected"), [(aten.mul.Tensor, DIFFERS), (aten.add.Tensor, SAME)])
def test_a_product_of_sums_is_no_sum_of_products(target: Any, expected: str) -> None:
    node, (x, y) = use(target, [(6,), (6,)], (6,))
    parts = [UsePart({x: _summand(k), y: _summand(k)}, (whole((6,)),), ((-1,),)) for k in (0, 1)]
    assert verdict(Use(node, tuple(parts))) == expected


def _summand(number: int) -> ReadPart:
    return ReadPart(whole((6,)), (number,))


def test_what_every_micro_batch_makes_of_the_whole_is_no_summand() -> None:
    node, (x,) = use(aten.sum.dim_IntList, [(4, 6)], (6,), [0])
    in_parts = [UsePart({x: ReadPart(_rows(4, 6, k))}, (whole((6,)),), ((-1,),)) for k in (0, 1)]
    assert verdict(Use(node, tuple(in_parts))) == SAME
    again = [UsePart({x: ReadPart(whole((4, 6)))}, (whole((6,)),), ((-1,),)) for _ in (0, 1)]
    assert verdict(Use(node, tuple(again))) == DIFFERS


def _rows(n: int, m: int, number: int) -> PartLayout:
    return PartLayout((n, m), (PartCut(0, n // 2, 2, number, number + 1),))


@torch.library.custom_op("checking::fatal", mutates_args=())
def fatal(x: torch.Tensor) -> torch.Tensor:
    """A kernel that ends its process."""
    os.kill(os.getpid(), signal.SIGFPE)
    return x.clone()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_use_that_ends_its_process_is_not_computed(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.rand(1 << 20).exp()  # starts threads of its own where there are several
    asked = []
    for target in (aten.neg.default, torch.ops.checking.fatal.default, aten.mul.Tensor):
        node, inputs = use(target, [(6,)] * (2 if target is aten.mul.Tensor else 1), (6,))
        parts = [UsePart(dict.fromkeys(inputs, _summand(k)), (whole((6,)),), ((-1,),)) for k in (0, 1)]
        asked.append(Use(node, tuple(parts)))
    assert verdicts(asked) == [SAME, NOT_COMPUTED, DIFFERS]
    torch.set_num_threads(before)


def test_a_large_call_is_made_small() -> None:
    n = 1 << 20
    node, (x, w) = use(aten.mm.default, [(n, 4096), (4096, 50257)], (n, 50257))
    first, last = (PartLayout((4096, 50257), (PartCut(1, 1, 50257, *ends),)) for ends in ((0, 25129), (25129, 50257)))
    parts = [
        UsePart({x: ReadPart(whole((n, 4096))), w: ReadPart(part)}, (PartLayout((n, 50257), part.cuts),), ((k,),))
        for k, part in enumerate((first, last))
    ]
    assert verdict(Use(node, tuple(parts))) == SAME


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 50), st.integers(1, 3000))
def test_smaller_parts_are_parts_of_the_smaller_tensor(blocks: int, n_parts: int, unit: int, other: int) -> None:
    shape = blocks * n_parts * unit * 1000, other
    cuts = [PartCut(0, unit * 1000, n_parts, k, k + 1) for k in range(n_parts)]
    node, (x,) = use(aten.neg.default, [shape], shape)
    parts = [PartLayout(shape, (cut,)) for cut in cuts]
    asked = Use(node, tuple(UsePart({x: ReadPart(part)}, (part,), ((k,),)) for k, part in enumerate(parts)))
    smaller = next(candidates(asked))
    made = [smaller.part(part, smaller.shape(shape)) for part in parts]
    assert math.prod(smaller.shape(shape)) <= math.prod(shape)
    runs = sorted(run for part in made for run in part.runs(0))
    assert (runs[0][0], runs[-1][1]) == (0, smaller.shape(shape)[0])
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert [part.share for part in made] == [part.share for part in parts]


# -- strategies --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("checking::running_sum", mutates_args=())
def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Over samples, so that no part of them has what comes before it."""
    return x.cumsum(0)


@running_sum.register_fake
def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


running_sum.register_autograd(lambda _, gradient: gradient.flip(0).cumsum(0).flip(0))


class Sums(nn.Module):
    """Layers of matrices, and perhaps a running sum between them."""

    def __init__(self, width: int, is_running: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_running = nn.Linear(width, width), nn.Linear(width, width), is_running

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = self.second(running_sum(x) if self.is_running else x)
        return x.square().mean()


def captured(width: int = 1024, *, is_running: bool = False) -> OpGraph:
    with torch.device("meta"):
        return capture(Sums(width, is_running), torch.zeros(4096, width), train=True)


def along_any_dimension(call: Any) -> list[Letter]:
    """A rule that is wrong for a running sum."""
    return aligned([call.first()], [call.output], [])


def test_a_wrong_rule_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES.by_name, "running_sum", along_any_dimension)
    graph = captured(is_running=True)
    with pytest.raises(
        InfeasibleError, match=r"strategy 'dp2' is not to be taken: checking.running_sum.default makes other"
    ):
        optimize(graph, CLUSTER, strategy="dp2")
    found = optimize(graph, Cluster.preset("2xK40-pcie"), seed=0, evaluations=100)
    assert "Left out: 'dp" in found.note
    assert "checking.running_sum.default makes other numbers in parts" in found.note
    assert "dp" not in found.strategy.text
    rows = compare_strategies(graph, CLUSTER, ["dp2", "tp2"]).rows
    assert [(row.strategy.text, row.is_refused) for row in rows] == [("tp2", False), ("dp2", True)]
    assert rows[0].result.checked.startswith("checked by computing: ")


def test_what_is_right_is_counted() -> None:
    result = optimize(captured(), CLUSTER, strategy="tp2")
    n, words = int(result.checked.split()[3]), "checked by computing: "
    assert result.checked == f"{words}{n} uses"
    assert n > 10
    assert result.checked in result.summary().splitlines()
    assert type(result).from_json(result.to_json()).checked == result.checked


def test_a_pipe_where_verdicts_are_kept_is_left_alone(folder: Path) -> None:
    """Whoever opens one waits for a writer."""
    found = optimize(captured(), CLUSTER, strategy="tp2")
    (file,) = folder.glob("*.json")
    file.unlink()
    os.mkfifo(file)
    assert optimize(captured(), CLUSTER, strategy="tp2").checked == found.checked
    assert file.is_fifo()


class Counted(nn.Module):
    """A loss that is divided by a number of labels, which is counted in parts and read as a whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 5), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        counts = y < 4
        if self.kind == "smoothed":
            return nn.functional.cross_entropy(found, y, label_smoothing=0.1)
        of_each = nn.functional.cross_entropy(found, y, reduction="none")
        return (of_each * counts).sum() / counts.sum()


@pytest.mark.parametrize("strategy", ["dp2", "dp2 | mb2", "pp2 gpipe mb2"])
@pytest.mark.parametrize("kind", ["smoothed", "masked mean"])
def test_a_count_that_divides_is_never_none(kind: str, strategy: str) -> None:
    graph = capture(Counted(kind), (torch.zeros(8, 8), torch.arange(8) % 5), train=True)
    found = optimize(graph, CLUSTER, strategy=strategy)
    assert found.checked.startswith("checked by computing: ")
    assert "not" not in found.checked


class Numbered(nn.Module):
    """A loss of rows that are looked up by their numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.kind = nn.EmbeddingBag(8, 8), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ self.table.weight
        if self.kind == "bags":
            found = found + self.table(y[:, None].expand(-1, 3))
            return found.square().mean()
        if self.kind == "labels":
            return nn.functional.cross_entropy(found, y, reduction="none").square().mean()
        return found[torch.arange(len(y)), y].square().mean()


@pytest.mark.parametrize("kind", ["bags", "labels", "counted out"])
def test_rows_that_parts_number_anew_are_no_false_alarm(kind: str) -> None:
    # Labels have more values than there are classes if they are drawn by the number of samples.
    graph = capture(Numbered(kind), (torch.zeros(64, 8), torch.arange(64) % 8), train=True)
    for strategy in ("dp2", "dp2 | mb2"):
        found = optimize(graph, CLUSTER, strategy=strategy)
        assert found.checked.startswith("checked by computing: ")
        assert ("could not" in found.checked) == (kind != "labels")


class Drawn(nn.Module):
    """Random numbers that depend on what a layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return (x * torch.bernoulli(x.detach().sigmoid())).mean()


def test_what_cannot_be_written_is_refused() -> None:
    graph = capture(Drawn(), torch.zeros(8, 8), train=True)
    with pytest.raises(InfeasibleError, match=r"it cannot be carried out: op .* draws random numbers by what it reads"):
        optimize(graph, CLUSTER, strategy="dp2")


def test_a_graph_from_a_file_is_not_called_checked(tmp_path: Path) -> None:
    save_graph(captured(64), tmp_path / "g.json")
    result = optimize(load_graph(tmp_path / "g.json"), CLUSTER, strategy="dp2")
    assert result.checked == "not checked by computing: the graph came from a file"


# -- what is remembered ------------------------------------------------------------------------------------------------


def forbidden() -> Any:
    raise AssertionError("it is known")


def test_the_second_time_nothing_is_computed(folder: Path) -> None:
    graph = captured(64)
    row = strategy_row(graph, CLUSTER, Strategy.parse("dp2")).result
    first, step = check(graph, CLUSTER, row), step_of(graph)
    assert step is not None
    assert first.uses > 10
    keep_step(graph, CapturedStep(forbidden, step.identity))
    assert check(graph, CLUSTER, row) == first
    (file,) = folder.iterdir()
    for damaged in ("{", "[]", '{"uses": {}}', '{"uses": {"a": 1}, "strategies": {}}'):
        file.write_text(damaged, encoding="utf-8")
        assert check(keep_step(graph, step), CLUSTER, row) == first
    keep_step(graph, CapturedStep(forbidden, step.identity))
    assert check(graph, CLUSTER, row) == first


def test_other_calls_of_equal_cost_are_other_steps() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.factor).sum()

    one, other = (step_of(capture(Scaled(factor), torch.zeros(4))) for factor in (2.0, 3.0))
    assert one is not None
    assert other is not None
    assert one.identity() != other.identity()


# -- strategies that are right -----------------------------------------------------------------------------------------


class Images(nn.Module):
    """Statistics of the batch, neighbours' entries, labels that count with the weight of their class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("weight", torch.ones(5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        result: torch.Tensor = nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels, self.weight)  # type: ignore[arg-type]
        return result


@pytest.mark.parametrize(
    "text",
    [
        "dp2 | statistics=sync",
        "dp2 | statistics=local",
        "mb2 | statistics=local",
        "hp2 | statistics=sync",
        "dp2 zero3 | mb2 | tp2 | statistics=local",
    ],
)
def test_no_false_alarm(text: str) -> None:
    graph = capture(Images(), (torch.zeros(16, 3, 16, 16), torch.zeros(16, dtype=torch.int64)), train=True)
    row = strategy_row(graph, CLUSTER, Strategy.parse(text)).result
    found = check(graph, CLUSTER, row)
    assert (found.problem, found.not_computed) == ("", 0)
