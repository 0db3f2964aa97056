"""`placement.fit`: methods side by side, the advice, the same answer for a seed, and one sentence for bad input."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
from typing import Any

import pytest
import torch
from fitted_models import classifier, cores
from hypothesis import given
from hypothesis import strategies as st
from replicas.small_tasks import regression
from torch import nn
from torch.utils.data import TensorDataset

import placement
from env.cluster import Cluster, Device
from graphs.errors import CaptureError, FitError, PlacementError, RankError, UnknownNameError
from placement.fitting.comparison import FitComparison, FitSweep, sweep_fit
from placement.fitting.log import CurvePoint
from placement.sizing.sweeps import FIT_KINDS, parse_sweep

CLUSTER = Cluster.preset("4xV100-pcie")


def fitted(methods: Any = "sync", **options: Any) -> FitComparison:
    model, data = classifier()
    return placement.fit(model, data, options.pop("cluster", CLUSTER), methods, **{"batch": 8, "lr": 0.3} | options)


def test_methods_stand_side_by_side_and_the_advice_names_the_first() -> None:
    found = fitted(["sync", "adam+lr=0.02", "sync+lr=1e-6"], until=0.5, updates=200)
    assert [run.method for run in found.runs] == ["sync", "adam+lr=0.02", "sync+lr=1e-6"]
    assert [run.reached for run in found.runs] == [True, True, False]
    assert found.best is min(found.runs[:2], key=lambda run: run.seconds)
    assert found.advice().startswith(f"{found.best.method} reaches loss 0.5 first, in ")
    assert found.advice().endswith("; sync+lr=1e-6 does not reach it.")
    first = found.runs[0]
    assert first.points[0].loss > first.points[-1].loss == first.loss <= 0.5
    told = json.loads(found.to_json())
    assert [row["method"] for row in told["results"]] == [run.method for run in found.runs]
    assert (told["cluster_hash"], told["workers"], told["batch"]) == (CLUSTER.hash, 4, 8)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    model, data = classifier(nn.Dropout(0.3))

    def runs(seed: int) -> Any:
        options = {"updates": 20, "every": 5, "stragglers": "pareto", "batch": 8}
        return placement.fit(model, data, CLUSTER, ["sync", "adagrad"], seed=seed, **options).runs

    assert runs(3) == runs(3)
    assert runs(3) != runs(4)


def test_synchronous_replicas_equal_one_worker_on_the_global_batch() -> None:
    four = fitted(updates=15, every=5)
    one = fitted(updates=15, every=5, workers=1, batch=32)
    for ours, other in zip(four.runs[0].points, one.runs[0].points, strict=True):
        assert ours.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.runs[0].bytes == 0


def test_the_model_is_not_changed_and_datasets_are_data_too() -> None:
    model, data = classifier(nn.BatchNorm1d(16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = placement.fit(model, TensorDataset(*data), CLUSTER, "sync", updates=5, batch=8)
    assert found.runs == placement.fit(model, data, CLUSTER, "sync", updates=5, batch=8).runs
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_are_computed_in_the_precision_that_is_asked_for() -> None:
    found = {name: fitted(updates=6, every=3, precision=name) for name in (None, "float32", "mixed")}
    losses = {name: [point.loss for point in each.runs[0].points] for name, each in found.items()}
    assert losses[None] == losses["float32"] != losses["mixed"] == pytest.approx(losses[None], rel=0.02)
    assert found["mixed"].runs[0].bytes == found[None].runs[0].bytes  # gradients travel in float32
    assert [each.graph.origin.precision for each in found.values()] == [None, "float32", "mixed"]


def test_batch_norm_is_said_where_workers_have_their_own_statistics() -> None:
    model, data = classifier(nn.BatchNorm1d(16))
    several = placement.fit(model, data, CLUSTER, "sync", updates=5, batch=8)
    assert "batch norm" in several.runs[0].note
    assert placement.fit(model, data, CLUSTER, "sync", updates=5, batch=8, workers=1).runs[0].note == ""


def test_a_run_that_diverges_is_not_reached() -> None:
    found = fitted(["sync+lr=1e30"], until=0.5)
    assert not found.runs[0].reached
    assert "diverged" in found.runs[0].note
    assert json.loads(found.to_json())["results"][0]["loss"] is None
    assert found.advice() == "Every method diverged; take a smaller learning rate."


def test_a_loss_that_grows_has_diverged() -> None:
    found = fitted(["sync+lr=10"], updates=20)
    run = found.runs[0]
    assert run.has_diverged
    assert math.isfinite(run.loss)
    assert re.fullmatch(r"diverged: the held-out loss went from \S+ to \S+; take a smaller lr", run.note)
    assert found.advice() == "Every method diverged; take a smaller learning rate."
    assert not fitted(["sync"], updates=20).runs[0].has_diverged


def test_without_a_loss_to_reach_the_lowest_is_best() -> None:
    found = fitted(["sync+lr=1e-6", "sync"], updates=30)
    assert found.best is found.runs[1]
    assert "has the lowest loss" in found.advice()


class Picky(nn.Module):
    """Knows 100 words, and takes no batch of a size."""

    def __init__(self, size: int = -1) -> None:
        super().__init__()
        self.words, self.size = nn.Embedding(100, 4), size

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        if len(word) == self.size:
            raise ValueError(f"{self.size} are too many")
        return nn.functional.cross_entropy(self.words(word), word % 4)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (-1, r"the model fails on 8 training samples, \d+ the first of them, \(.*index out of range"),
        (20, r"the model fails on the 20 held-out samples \(.*20 are too many"),
    ],
)
@pytest.mark.parametrize("real", [False, True])
def test_a_model_that_fails_on_later_samples_is_told(size: int, said: str, real: bool) -> None:
    words = torch.arange(200) % 100
    words[77] = 100 if size < 0 else 0
    with pytest.raises(PlacementError, match=said):
        placement.fit(
            Picky(size), words, cores(2) if real else CLUSTER, "sync", batch=8, workers=1, updates=30, real=real
        )


def test_an_error_has_the_methods_and_sizes_that_were_finished() -> None:
    def kill(method: str, point: CurvePoint) -> None:
        if method == "adam" and point.updates:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    options: Any = {"cluster": cores(2), "updates": 200, "until": 0.01}

    def fit_one(size: int) -> FitComparison:
        return fitted("sync" if size == 1 else ["sync", "adam"], real=size > 1, workers=size, progress=kill, **options)

    with pytest.raises(RankError, match=r"worker \d was killed by SIGKILL, and this method") as caught:
        fit_one(2)
    assert isinstance(caught.value.finished, FitComparison)
    assert caught.value.finished.interrupted
    assert [run.method for run in caught.value.finished.runs] == ["sync"]
    with pytest.raises(RankError) as caught:
        sweep_fit(parse_sweep("workers=1..2", FIT_KINDS), fit_one)
    assert isinstance(caught.value.finished, FitSweep)
    assert caught.value.finished.sweep.sizes == (1,)
    with pytest.raises(RankError) as caught:
        fitted("adam", real=True, progress=kill, **options)
    assert caught.value.finished is None


def test_an_output_that_is_no_loss_is_told() -> None:
    data = torch.randn(40, 8)
    assert (
        "no loss: the mean of the model's output" in placement.fit(nn.Linear(8, 3), data, CLUSTER, "sync").runs[0].note
    )
    given = placement.fit(nn.Linear(8, 3), data, CLUSTER, "sync", loss=lambda output: output.square().mean())
    assert given.runs[0].note == fitted().runs[0].note == ""


def test_ctrl_c_leaves_the_methods_that_are_done() -> None:
    def interrupt(method: str, point: CurvePoint) -> None:
        if method == "adam" and point.updates:
            signal.raise_signal(signal.SIGINT)

    found = fitted(["sync", "adam", "lars"], updates=20, progress=interrupt)
    assert found.interrupted
    assert found.runs == fitted("sync", updates=20).runs
    assert json.loads(found.to_json())["interrupted"]
    with pytest.raises(KeyboardInterrupt):  # nothing is done
        fitted("adam", updates=20, progress=interrupt)


def test_ctrl_c_leaves_the_sizes_that_are_done() -> None:
    def fit_one(size: int) -> FitComparison:
        def interrupt(method: str, point: CurvePoint) -> None:
            if size == 3 and method == "adam" and point.updates:
                signal.raise_signal(signal.SIGINT)

        return fitted(["sync", "adam"], workers=size, until=0.9, updates=20, progress=interrupt)

    found = sweep_fit(parse_sweep("workers=1..4", FIT_KINDS), fit_one)
    assert found.interrupted
    assert [size for size, _ in found.runs("adam")] == [1, 2]
    assert not sweep_fit(parse_sweep("workers=1..2", FIT_KINDS), fit_one).interrupted


def test_seconds_and_updates_end_runs() -> None:
    assert fitted(updates=7).runs[0].updates == 7
    found = fitted(seconds=0.002, updates=10_000, every=1).runs[0]
    assert found.seconds == 0.002
    assert 0 < found.updates < 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": "synk"}, "unknown method 'synk', did you mean 'sync'"),
        ({"methods": []}, "no method is named"),
        ({"methods": "local_sgd:period=4:period=8"}, "gives 'period' of local_sgd twice"),
        ({"methods": "lars:trust=inf"}, "'trust=inf' has no number"),
        ({"methods": "sync+lr=nan"}, "lr is nan; expected a number, 0 or more"),
        ({"methods": "diloco:period=8", "updates": 7}, "period=8 is more than the 7 updates of the run"),
        ({"methods": "downpour:push=2000"}, "push=2000 is more than the 1,000 updates of the run"),
        ({"methods": "sandblaster:portions=91", "workers": 2}, "for each of 2 workers are more than the 180 training"),
        ({"batch": 3.5}, "a batch of 3.5 samples was asked for"),
        ({"updates": 2.5}, "updates is 2.5; expected a whole number"),
        ({"lr": "a"}, "lr is 'a'; expected a number above 0"),
        (
            {"precision": "master"},
            "precision 'master' has weights in bfloat16 and gradients in float32; take float32 or",
        ),
        ({"precision": "mixt"}, "did you mean 'mixed'"),
        ({"seed": -1}, "seed is -1; expected a whole number from 0"),
        ({"workers": 5}, "5 workers were asked for, and cluster '4xV100-pcie' has 4"),
        ({"strategy": "dp8"}, "a worker takes 8 devices"),
        ({"batch": 181}, "a batch of 181 samples was asked for, and 180 of the 200 are to train on"),
        ({"until": float("nan")}, "expected a number"),
        ({"updates": 0}, "updates is 0"),
        ({"seconds": -1.0}, "seconds is -1"),
        ({"lr": 0.0}, "lr is 0"),
        ({"stragglers": "parto"}, "did you mean 'pareto'"),
        (
            {"stragglers": "exponential:mean=1e308"},
            "mean=1e308 is out of range; expected a number from 0 to 1e",
        ),
        ({"stragglers": "slow:worker=9", "workers": 2}, "there is no worker 9; expected a whole number below 2"),
        *(
            ({"methods": f"{name}+qsgd:s=16"}, f"{name} sends weights, not gradients, and cannot compress them")
            for name in ("gossip", "elastic", "sandblaster")
        ),
    ],
)
def test_bad_input_gets_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        fitted(options.pop("methods", "sync"), **options)
    assert said in str(caught.value)
    assert isinstance(caught.value, FitError | UnknownNameError)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ("no model", torch.zeros(4, 8), "the model is a str"),
        (nn.Linear(8, 3), torch.zeros(1, 8), "2 or more"),
        (nn.Linear(8, 3), (torch.zeros(4, 8), torch.zeros(5)), "4 and 5 rows"),
        (nn.Linear(8, 3), [[1, 2]], "the data are a list"),
        (nn.Linear(8, 3), (torch.zeros(4, 8), torch.zeros(4)), "cannot be trained on these data"),
        (
            nn.Linear(8, 3),
            torch.tensor([[0.0], [float("nan")]]),
            "tensor 0 of the data has numbers that are not finite",
        ),
        (nn.Linear(8, 3).double(), torch.zeros(4, 8), "torch.float64"),
        (nn.Linear(8, 3).requires_grad_(False), torch.zeros(4, 8), "no trainable parameter"),
    ],
)
def test_models_and_data_that_do_not_go_together_are_refused(model: Any, data: Any, said: str) -> None:
    with pytest.raises(FitError) as caught:
        placement.fit(model, data, CLUSTER, "sync")
    assert said in str(caught.value)


class Branching(nn.Module):
    """Which of its layers come is decided by what is in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden) if hidden.sum() > 0 else hidden


def test_a_model_whose_ops_cannot_be_traced_is_timed_by_its_modules() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output**2).mean()

    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="each leaf module is one op"):
        found = placement.fit(Branching(), data, CLUSTER, "sync", loss=loss, updates=4)
    assert found.runs[0].updates == 4
    with pytest.raises(CaptureError, match="leave out the strategy"):
        placement.fit(Branching(), data, CLUSTER, "sync", loss=loss, updates=4, strategy="tp2")


def test_a_name_is_no_cluster() -> None:
    with pytest.raises(ValueError, match=r"expected a Cluster, got str '4xV100-pcie': use placement\.Cluster\.preset"):
        fitted(cluster="4xV100-pcie")


def test_real_runs_are_for_what_this_machine_has() -> None:
    with pytest.raises(FitError, match="take 4 GPUs, and this machine has 0; take the cluster local"):
        fitted(real=True)
    odd = Cluster("odd", (Device("npu", "npu", 2**30, {"float32": 1e9}, 1e9),), ())
    with pytest.raises(FitError, match="CPU cores or GPUs, and cluster 'odd' has devices of kind 'npu'"):
        fitted(cluster=odd, real=True)


def test_a_real_run_has_the_losses_of_virtual_time() -> None:
    options = {"cluster": cores(2), "updates": 10, "every": 5}
    there, here = fitted(**options), fitted(real=True, stragglers="exponential:mean=0.1", **options)
    assert here.is_real
    assert [p.loss for p in here.runs[0].points] == pytest.approx([p.loss for p in there.runs[0].points], rel=1e-4)


@given(samples=st.integers(1, 40), batch=st.integers(1, 12), workers=st.integers(1, 4), steps=st.integers(1, 12))
def test_workers_share_out_each_epoch(samples: int, batch: int, workers: int, steps: int) -> None:
    task = regression(samples, batch)
    taken = torch.cat([task.samples(worker, workers, step) for step in range(steps) for worker in range(workers)])
    assert len(taken) == steps * workers * batch
    for epoch in taken.split(samples):
        assert len(set(epoch.tolist())) == len(epoch)  # each once; the last epoch may not be over


def test_a_single_worker_stands_beside_several() -> None:
    found = fitted(updates=20)
    assert found.one_worker is not None
    assert (found.one_worker.method, found.one_worker.updates, found.one_worker.bytes) == ("one worker", 20, 0)
    alone = fitted(updates=20, workers=1)
    assert alone.one_worker is None
    assert alone.runs[0].points == found.one_worker.points
