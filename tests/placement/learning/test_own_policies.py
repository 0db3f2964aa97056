"""Policies of a user's own, by argument, by entry point and as a method; threads and prices of learned ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_policy import OwnPolicy
from small_problems import PAIR
from training_runs import fans

from baselines import prices
from graphs.errors import MismatchError, PolicyFileError, UnknownNameError
from placement import optimize, train, verify
from placement.learning.learners.registry import TRAINABLE
from placement.learning.policies import registry
from placement.learning.policies.policy import PlacementPolicy


def test_a_policy_of_ones_own_is_trained_and_is_a_method(tmp_path: Path) -> None:
    found = train(fans(), PAIR, OwnPolicy, output=tmp_path / "own.zip", evaluations=64)
    assert found.results[0] is not None
    result = optimize(fans(), PAIR, f"policy:{found.policy_file}", evaluations=33)
    assert result.evaluations == 33
    assert verify(result).holds


def test_a_policy_of_another_package_is_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nelsewhere = own_policy:OwnPolicy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.policy_kind("elsewhere") is OwnPolicy


def test_a_policy_that_nobody_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twin(OwnPolicy):
        name = "hierarchical"

    file = train(fans(), PAIR, OwnPolicy, output=tmp_path / "own.zip", evaluations=32).policy_file
    monkeypatch.setattr(registry, "_subclasses", lambda: iter(()))
    with pytest.raises(
        PolicyFileError, match=r"holds a policy 'own', which this version does not have.*Import its class"
    ):
        optimize(fans(), PAIR, f"policy:{file}")
    with pytest.raises(UnknownNameError, match="nobody"):
        train(fans(), PAIR, "nobody", output=tmp_path / "no.zip")
    with pytest.raises(MismatchError, match="'hierarchical' is the name of another policy"):
        train(fans(), PAIR, Twin, output=tmp_path / "no.zip")


def test_each_batch_of_a_saved_policy_is_drawn_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = train(fans(), PAIR, OwnPolicy, output=tmp_path / "own.zip", evaluations=32).policy_file
    threads: list[int] = []
    propose = OwnPolicy.propose

    def watched(policy: PlacementPolicy, *arguments: Any, **options: Any) -> Any:
        threads.append(torch.get_num_threads())
        torch.set_num_threads(2)  # as a compiled parallel loop does
        return propose(policy, *arguments, **options)

    monkeypatch.setattr(OwnPolicy, "propose", watched)
    optimize(fans(), PAIR, f"policy:{file}", evaluations=100)
    assert threads == [1] * 5


def test_every_trainable_policy_has_a_price() -> None:
    assert set(prices.LEARNING) == set(TRAINABLE)
