"""Methods whose parts do not go together, or whose numbers are out of range: one sentence each."""

from __future__ import annotations

import pytest

from graphs.errors import FitError
from placement.fitting.methods import FitMethod
from placement.fitting.registry import EXCHANGES

REFUSED = {
    "sync+first:extra=1": "sync takes no arrival rule; leave it out, or choose parameter_server, which has one.",
    "downpour+stale": "downpour takes no arrival rule",
    "gossip+stale": "gossip takes no arrival rule",
    "elastic+first": "elastic takes no arrival rule",
    "local_sgd+first": "local_sgd takes no arrival rule",
    "diloco+stale": "diloco takes no arrival rule",
    "sandblaster+first": "sandblaster takes no arrival rule",
    "first:extra=3": "first:extra=3 is out of range: of 3 workers, at most 2 can be backups; choose fewer.",
    "first:extra=-1": "first:extra=-1 is out of range",
    "stale:bound=-1": "stale:bound=-1 is out of range; choose 0 or more.",
    "parameter_server:shards=0": "parameter_server:shards=0 is out of range; choose 1 or more.",
    "parameter_server:shards=2+first": "first takes one shard, since several would take the first of different workers",
    "downpour:fetch=0": "downpour:fetch=0 is out of range; choose 1 or more.",
    "downpour:push=0": "downpour:push=0 is out of range",
    "downpour:shards=0": "downpour:shards=0 is out of range",
    "gossip:topology=star": "gossip:topology=star is not known; choose ring or random.",
    "elastic:period=0": "elastic:period=0 is out of range",
    "elastic:rate=1.5": "elastic:rate=1.5 is out of range; choose a value from 0 to 1.",
    "elastic:rate=nan": "elastic:rate=nan is out of range",
    "local_sgd:period=0": "local_sgd:period=0 is out of range",
    "local_sgd:after=-1": "local_sgd:after=-1 is out of range",
    "local_sgd:group=4": "local_sgd:group=4 is out of range; choose a value from 0 to 3.",
    "local_sgd:rounds=0": "local_sgd:rounds=0 is out of range",
    "diloco:period=0": "diloco:period=0 is out of range",
    "diloco:outer_lr=-1.0": "diloco:outer_lr=-1.0 is out of range",
    "diloco:outer_momentum=2": "diloco:outer_momentum=2.0 is out of range",
    "sandblaster:history=0": "sandblaster:history=0 is out of range",
    "sandblaster:portions=0": "sandblaster:portions=0 is out of range",
    "sandblaster:shards=0": "sandblaster:shards=0 is out of range",
    "sandblaster+adam": "sandblaster has its own batch rule, L-BFGS; leave the batch rule out.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_go_together_is_refused(text: str) -> None:
    method = FitMethod.parse(text)
    sentence = method.exchange.refuse(method, 3)
    assert sentence is not None
    assert sentence.startswith(REFUSED[text])
    assert sentence.endswith(".")


def test_gossip_takes_two() -> None:
    method = FitMethod.parse("gossip")
    assert method.exchange.refuse(method, 1) == (
        "gossip takes 2 workers or more, and here is 1; add workers, or choose sync."
    )


@pytest.mark.parametrize("name", EXCHANGES)
def test_defaults_go_together(name: str) -> None:
    method = FitMethod.parse(name)
    assert method.exchange.refuse(method, 2) is None
    assert FitMethod.parse(method.text) == method


def test_an_arrival_rule_alone_means_a_parameter_server() -> None:
    assert FitMethod.parse("first:extra=2") == FitMethod.parse("parameter_server+first:extra=2")
    assert FitMethod.parse("stale:bound=0").text == "parameter_server+stale:bound=0"
    assert FitMethod.parse("sync").text == "sync"


def test_a_method_is_called_what_it_was_asked_for_as() -> None:
    asked = FitMethod.parse(" local_sgd:period=8 ")
    assert (asked.name, asked.text) == ("local_sgd:period=8", "local_sgd")
    assert asked == FitMethod.parse("local_sgd")
    assert FitMethod.parse("qsgd:s=7+lr=0.1").name == "qsgd:s=7+lr=0.1"


@pytest.mark.parametrize(("text", "kind"), [("qsgd:s=1.5", "whole number of at most 1000000"), ("sync+lr=x", "number")])
def test_a_value_that_is_no_number_is_named(text: str, kind: str) -> None:
    with pytest.raises(FitError, match=f"has no {kind}; expected a {kind} after '='"):
        FitMethod.parse(text)
