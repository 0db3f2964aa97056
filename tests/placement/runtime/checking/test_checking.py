"""Before a strategy is advised it runs on a smaller model, or its ops are computed in parts."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import InfeasibleError
from graphs.files import load_graph, save_graph
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, keep_step, step_of
from graphs.transforms.optimizers import with_optimizer
from graphs.transforms.strategy import Strategy
from graphs.zoo.cache import model_graph
from placement.inputs.sources import read_source
from placement.optimization import optimize
from placement.runtime.checking import strategy_check
from placement.runtime.checking.check import check
from placement.runtime.torch_runner.setup import Setup
from placement.solving.checked import Checked
from placement.solving.strategy_row import strategy_row

CLUSTER = Cluster.preset("4xV100-pcie")
OF_STEPS = "loss, gradients and one update"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path))
    return tmp_path


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(self.widen(self.norm(x)).relu()))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Counts its own layers."""

    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.num_layers = layers
        self.table, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        for number in range(self.num_layers):
            x = self.blocks[number](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words(samples: int = 32, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(50, (samples, length)), torch.randint(50, (samples, length))


def checked(model: nn.Module, args: Any, strategy: str) -> Checked:
    graph = capture(model, args, train=True)
    return of_graph(graph, strategy)


def of_graph(graph: OpGraph, strategy: str) -> Checked:
    return check(graph, CLUSTER, strategy_row(graph, CLUSTER, Strategy.parse(strategy)).result)


# -- on a smaller model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["dp4", "dp2 zero3 | mb2", "tp2", "pp2 1f1b mb8"])
def test_a_strategy_runs_on_a_smaller_model(strategy: str) -> None:
    found = checked(model := Words(), words(), strategy)
    assert found == Checked(2, "2 of 6 layers, 8 samples", OF_STEPS)
    assert found.words == f"checked by running 2 ranks on a smaller model (2 of 6 layers, 8 samples): {OF_STEPS} equal"
    assert len(model.blocks) == model.num_layers == 6
    assert model.blocks[0].drop.p == 0.1


def test_a_model_in_evaluation_mode_is_trained() -> None:
    assert checked(Words().eval(), words(), "dp2") == Checked(2, "2 of 6 layers, 8 samples", OF_STEPS)


def test_what_a_model_returns_is_compared_for_inference() -> None:
    class Viewed(nn.Linear):
        """Of six samples alone."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.arange(240.0).view(x.shape)

    args = (torch.rand(6, 5, 8),)
    found = of_graph(capture(Viewed(8, 8), args), "tp2")
    assert found == Checked(2, compared="outputs")
    found = of_graph(capture(Viewed(8, 8), args), "dp2")
    assert "shape '[3, 5, 8]' is invalid" in found.problem


def test_built_in_models_have_small_sizes() -> None:
    found = of_graph(model_graph("gpt2", train=True), "tp4 sp")
    assert found.ranks == 2
    assert found.smaller == "2 of 12 layers, width 16, 8 samples"
    assert found.problem == ""


class Images(nn.Module):
    """With statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.conv(x)).relu().mean((2, 3))), labels)


@pytest.mark.parametrize("statistics", ["sync", "local"])
def test_statistics_of_batches(statistics: str) -> None:
    args = torch.rand(16, 3, 12, 12), torch.arange(16) % 5
    assert checked(Images(), args, f"dp4 | statistics={statistics}") == Checked(2, "8 samples", OF_STEPS)


def test_a_function_is_called_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def make(batch=32):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()), (torch.rand(batch, 6),)\n"
    )
    graph = read_source(f"{file}:make", train=True).graph
    assert of_graph(with_optimizer(graph, "adamw"), "dp2") == Checked(2, "8 samples", OF_STEPS)


def test_a_style_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = strategy_check.setup_of

    def without_a_style(*args: Any) -> Setup:
        setup = whole(*args)
        kept = {path: style for path, style in setup.styles.items() if not path.endswith("narrow")}
        return replace(setup, styles=kept)

    monkeypatch.setattr(strategy_check, "setup_of", without_a_style)
    model = Words()
    with pytest.raises(InfeasibleError, match=r"strategy 'tp2' is not to be taken: .* in a trial run"):
        optimize(capture(model, words(), train=True), CLUSTER, strategy="tp2")


def test_gradients_that_nobody_reduces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = strategy_check.setup_of
    monkeypatch.setattr(strategy_check, "setup_of", lambda *args: replace(whole(*args), is_ddp=False))
    found = checked(Words(), words(), "dp2")
    assert re.match("gradient .* in a trial run differs by ", found.problem)


def test_a_rank_that_fails_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(strategy_check, "StrategyModule", fails)
    assert checked(Words(), words(), "dp2").problem == "its ranks fail in a trial run: RuntimeError: no such kernel"


def test_a_rank_that_ends_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check, "StrategyModule", lambda *_: os.kill(os.getpid(), signal.SIGFPE))
    assert checked(Words(), words(), "dp2").problem.endswith(" of a trial run was killed by SIGFPE")


def test_a_rank_that_waits_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check, "StrategyModule", lambda *_: time.sleep(100))
    monkeypatch.setattr(strategy_check, "LIMIT_S", 6.0)
    assert checked(Words(), words(), "dp2").words == "not checked: it took longer than 6 s"


def test_a_missing_gradient_is_a_difference() -> None:
    expected = {"loss": torch.ones(()), "gradient a": torch.ones(3)}
    assert strategy_check.first_difference(expected, expected, {}) == ""
    missing = strategy_check.first_difference({"loss": torch.ones(())}, expected, {})
    assert missing == "gradient a in a trial run is nothing, in one piece [3]"
    assert "differs by nan" in strategy_check.first_difference(
        {**expected, "loss": torch.tensor(torch.nan)}, expected, {}
    )
    moved = {**expected, "loss": torch.tensor(1.01)}
    assert strategy_check.first_difference(moved, expected, {"loss": 0.01}) == ""
    assert "loss in a trial run differs by 0.01, " in strategy_check.first_difference(moved, expected, {"loss": 1e-4})


# -- ops in parts ------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + torch.randn_like(x)).square().mean()


class OfSixteen(nn.Module):
    """Has the number of samples in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(16, 2, 3).square().mean()


def test_what_draws_random_numbers_is_computed_op_by_op() -> None:
    found = checked(model := Noisy(), torch.rand(16, 16), "dp2")
    assert found.ranks == 0
    assert found.ops > 4
    assert found.words.startswith(f"checked by computing: {found.ops} ops in parts")
    assert list(model.parameters())


def test_what_cannot_be_made_smaller_is_run_as_it_is() -> None:
    assert checked(OfSixteen(), torch.rand(16, 16), "tp2") == Checked(2, compared=OF_STEPS)
    assert "'[16, 2, 3]' is invalid" in checked(OfSixteen(), torch.rand(16, 16), "dp2").problem


def test_a_model_that_is_gone_is_computed_op_by_op() -> None:
    graph = capture(Words(), words(), train=True)
    assert of_graph(graph, "dp2").ranks == 0


def test_a_graph_from_a_file_is_not_called_checked(tmp_path: Path) -> None:
    graph = capture(OfSixteen(), torch.rand(16, 16), train=True)
    save_graph(graph, tmp_path / "g.json")
    result = optimize(load_graph(tmp_path / "g.json"), CLUSTER, strategy="dp2")
    assert result.checked == "not checked: the graph came without its model"


# -- what is remembered ------------------------------------------------------------------------------------------------


def forbidden(*_: Any) -> Any:
    raise AssertionError("it is known")


def test_the_second_time_nothing_is_computed(folder: Path) -> None:
    model = Noisy()
    graph = capture(model, torch.rand(16, 16), train=True)
    step, first = step_of(graph), of_graph(graph, "dp2")
    assert step is not None
    assert first.ops > 4
    keep_step(graph, CapturedStep(forbidden, step.identity, forbidden))
    assert of_graph(graph, "dp2") == first
    (file,) = folder.iterdir()
    for damaged in ("{", "[]", '{"a": 1}'):
        file.write_text(damaged, encoding="utf-8")
        assert of_graph(keep_step(graph, step), "dp2") == first
    file.unlink()
    os.mkfifo(file)  # whoever opens one waits for a writer
    assert of_graph(graph, "dp2") == first
    assert file.is_fifo()


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
