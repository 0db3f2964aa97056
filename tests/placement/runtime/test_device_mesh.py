"""A script that has made a device mesh hands it over: the strategy's own is used, any other one refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from device_mesh_work import X, model

import placement
from graphs.capture.record import default_loss
from tests.helpers.parallel.forked_ranks import on_ranks
from tests.helpers.placed_models import cpus

REFUSED = {
    "other axis": "the device mesh is tp2; expected dp2, as strategy 'dp2' has it\\.",
    "other order": r"the device mesh has its ranks in the order \[1, 0\]; expected 0 to 1, .*",
    "one": "the device mesh is one process; expected dp2, .*",
    "placement": "the result is a placement, which has no device mesh; leave out mesh=\\.",
}


def test_the_mesh_of_a_script_is_that_of_the_strategy_or_refused(tmp_path: Path) -> None:
    graph = placement.capture(model(), (X,), train=True)
    placement.optimize(graph, cpus(2), strategy="dp2").save(tmp_path / "found.json")
    placement.optimize(graph, cpus(2), strategy="none", method="hash").save(tmp_path / "placement.json")
    expected = float(default_loss(model()(X)).detach())
    for found in on_ranks("device_mesh_work:handed_over", str(tmp_path)):
        for name, said in found.items():
            if name in REFUSED:
                assert re.fullmatch(REFUSED[name], said), name
            else:
                assert said == pytest.approx(expected), name
