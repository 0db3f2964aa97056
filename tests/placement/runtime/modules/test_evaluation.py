"""A model that is trained under a strategy is evaluated in between, on the parts that its processes store."""

from __future__ import annotations

import evaluation_work
import pytest

import placement
from placement.runtime.ranks.launch import launch
from tests.helpers.placed_models import cpus, with_host

# With statistics of the batch, and without.
STRATEGIES = {
    "dp2 zero1 | statistics=sync": True,
    "dp2 zero3 | statistics=sync": True,
    "tp2": True,
    "pp2 interleaved mb2": False,
    "dp2 | mb2 | recompute=first+norm": False,
    "dp2 zero1 | statistics=sync | offload=optimizer": True,
    "dp2 zero3 | statistics=sync | offload=optimizer": True,
    "pp2 1f1b mb2 | offload=optimizer": False,
    "dp2 zero3 | statistics=sync | offload=parameters": True,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[list[float]]]]:
    folder, described = tmp_path_factory.mktemp("evaluation"), []
    for number, (strategy, of_batch) in enumerate(STRATEGIES.items()):
        model, batch = evaluation_work.model(of_batch), evaluation_work.batch(0)
        graph = placement.capture(model, batch, train=True, loss=evaluation_work.loss)
        cluster = with_host(2) if "offload" in strategy else cpus(2)
        placement.optimize(graph, cluster, strategy=strategy).save(folder / f"{number}.json")
        described.append((str(folder / f"{number}.json"), of_batch))
    return launch("evaluation_work:evaluated", described, ["cpu", "cpu"], limit_s=240)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_between_steps_is_that_of_one_process(found: list[list[list[list[float]]]], strategy: str) -> None:
    expected = evaluation_work.plain(STRATEGIES[strategy])
    for rank in found:
        for mine, theirs in zip(rank[list(STRATEGIES).index(strategy)], expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
