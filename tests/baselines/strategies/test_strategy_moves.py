"""Moves of a search over strategies: each is a legal text, and there is one of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from baselines.strategies.applied import applied
from baselines.strategies.devices import whole_shares
from baselines.strategies.searching.moves import KINDS, neighbours
from baselines.strategies.searching.patterns import first_layers, patterns
from baselines.strategies.searching.space import sharded
from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import MismatchError, StrategyError
from graphs.module_paths import pattern_of
from graphs.opgraph import Op, OpGraph, Phase
from graphs.records import State
from graphs.transforms.recomputing import unmatched
from graphs.transforms.recomputing.selecting import segments
from graphs.transforms.splitting.op_states import where
from graphs.transforms.strategy import MeshRule, Strategy
from graphs.zoo import build
from graphs.zoo.decoders import Decoder, DecoderConfig

MIXED, ALIKE = Cluster.preset("mixed-gpus"), Cluster.preset("2x8xH100-ib")
TEXTS = ("none", "dp4", "dp2 shares=3:1 | tp2 sp", "pp2 interleaved mb4 | tp2", "dp2 zero1 | pp2 1f1b mb2")
TEXTS += ("dp2 | dp2 zero3",)


@pytest.fixture(scope="module")
def transformer() -> OpGraph:
    """A small GPT-2's training step on a batch of 8."""
    model = build("gpt2", device="meta", small=True, batch_size=8)
    return capture(model.model, model.args, train=True)


@pytest.mark.parametrize("cluster", [MIXED, ALIKE], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("text", TEXTS)
def test_every_move_is_a_legal_text_and_another_strategy(transformer: OpGraph, cluster: Cluster, text: str) -> None:
    strategy = Strategy.parse(text)
    found = list(neighbours(transformer, cluster, strategy))
    moves = [move for _, move in found]
    assert all(Strategy.parse(move.text) == move for move in moves)
    assert len({strategy, *moves}) == len(found) + 1
    assert {kind for kind, _ in found} <= set(KINDS)
    assert all(move.devices <= cluster.n_devices for move in moves)
    assert found == list(neighbours(transformer, cluster, strategy))


def test_there_is_a_move_of_every_kind(transformer: OpGraph) -> None:
    kinds = {kind for text in TEXTS for kind, _ in neighbours(transformer, MIXED, Strategy.parse(text))}
    assert kinds == set(KINDS) - {"offload", "experts"}  # without a host, and without experts


def test_most_moves_are_allowed(transformer: OpGraph) -> None:
    """The others fail for a reason that only graph and order know, such as a batch that is too small."""
    moves = [move for _, move in neighbours(transformer, MIXED, Strategy.parse("dp2 zero1 | pp2 1f1b mb2"))]
    refused = []
    for move in moves:
        try:
            applied(transformer, MIXED, move)
        except (StrategyError, MismatchError) as error:
            refused.append((move.text, str(error)))
    assert len(refused) <= len(moves) / 4, refused


def test_a_mesh_moves_and_keeps_its_options(transformer: OpGraph) -> None:
    meshes = {move.text for kind, move in neighbours(transformer, ALIKE, Strategy.parse("dp4 zero1 | tp2 sp"))}
    assert {"dp2 zero1 | tp4 sp", "dp8 zero1", "dp2 zero1 | pp2 1f1b mb4 | tp2 sp", "dp3 zero1 | tp2 sp"} <= meshes
    assert {"dp8 zero1 | tp2 sp", "dp2 zero1 | tp2 sp", "dp4 zero1 | cp2 | tp2 sp"} <= meshes


def test_a_sequence_is_cut_in_three_ways(transformer: OpGraph) -> None:
    ways = {"cp4", "cp4 ring", "cp4 ulysses"}
    for text in ways:
        found = {move.text for kind, move in neighbours(transformer, ALIKE, Strategy.parse(text)) if kind == "sequence"}
        assert found == ways - {text}


def test_storage_is_split_inside_hosts_and_in_groups_of_other_sizes(transformer: OpGraph) -> None:
    def moved(text: str, cluster: Cluster) -> set[str]:
        return {move.text for _, move in neighbours(transformer, cluster, Strategy.parse(text))}

    assert {"dp2 | dp8 zero1", "dp2 | dp8 zero2", "dp2 | dp8 zero3", "dp16 zero3"} <= moved("dp16", ALIKE)
    assert {"dp4 | dp2 zero3 | tp4", "dp8 zero3 | tp4"} <= moved("dp8 | tp4", Cluster.preset("4x8xH100-ib"))
    assert {"dp16", "dp16 zero3", "dp4 | dp4 zero3", "dp2 | dp8 zero1"} <= moved("dp2 | dp8 zero3", ALIKE)
    assert not any(text.count("dp") > 1 for text in moved("dp4 zero3", Cluster.preset("8xH100-nvswitch")))
    # What keeps more of the storage on each device comes first.
    assert [one.text for one in sharded(ALIKE, Strategy.parse("dp16"), 3)] == ["dp2 | dp8 zero3", "dp16 zero3"]
    assert [one.text for one in sharded(ALIKE, Strategy.parse("dp2 | tp8"), 1)] == ["dp2 zero1 | tp8"]


def test_replicas_cut_the_weights_of_one_block_more_or_less(transformer: OpGraph) -> None:
    def moved(text: str) -> set[str]:
        return {move.text for _, move in neighbours(transformer, ALIKE, Strategy.parse(text))}

    assert {"dp4 tp on layers.*", "dp4 tp on word_embedding+output"} <= moved("dp4")
    both = moved("dp4 tp on layers.*")
    assert {"dp4", "dp4 tp on word_embedding+output+layers.*", "dp8 tp on layers.*", "dp2 | tp2"} <= both


def test_experts_are_spread_where_there_are_some() -> None:
    model = build("mixtral_8x7b", device="meta", small=True, batch_size=8)
    graph = capture(model.model, model.args, train=True)
    meshes = {move.text for kind, move in neighbours(graph, ALIKE, Strategy.parse("dp4 zero1")) if kind == "mesh"}
    assert {"dp2 zero1 | ep2", "dp4 zero1 | ep2"} <= meshes


def test_patterns_are_those_of_the_graph(transformer: OpGraph) -> None:
    found = patterns(transformer)
    assert found.recomputed[:3] == ((), ("*",), ("kind:*scaled_dot_product*",))
    assert unmatched(transformer, [pattern for several in found.recomputed for pattern in several]) == []
    assert "layers.*" in found.blocks
    assert "height" not in found.words
    axes = {rule.name for _, move in neighbours(transformer, ALIKE, Strategy()) for rule in move.mesh}
    assert axes == {"dp", "cp", "tp"}  # neither images nor experts


def test_parts_of_layers_run_again_cheap_ones_first() -> None:
    config = DecoderConfig(8, 1024, 2, 1024, heads=8, key_value_heads=2, inner_width=4096, vocabulary=1024)
    with torch.device("meta"):
        words = torch.zeros(8, 1024, dtype=torch.long)
        graph = capture(Decoder(config), (words, words), train=True)
    found = patterns(graph).recomputed
    parts = [each for each in found if each and "inner" in each[0]]
    assert parts[0] == ("layers.0.inner",)  # of the first layers alone
    assert ("layers.*.inner",) in parts
    assert parts[-1] == ("layers.*.inner", "layers.*.attention")  # a norm that is one op frees nothing by itself
    assert unmatched(graph, [pattern for several in found for pattern in several]) == []


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 35, 99])
def test_first_layers_are_counted(count: int) -> None:
    from fnmatch import fnmatchcase

    chosen = list(first_layers("layers", count))
    matched = [i for i in range(100) if any(fnmatchcase(f"layers.{i}", pattern) for pattern in chosen)]
    assert matched == list(range(count))


NAMES = st.text(st.characters(exclude_characters=".") | st.sampled_from("[]*?! +|-\n0123"), min_size=1, max_size=5)
PATHS = st.lists(NAMES | st.sampled_from(["0", "1", "2", "01", "on", "kind:a"]), min_size=1, max_size=3).map(".".join)


@example(["0", "!.0"])
@example(["0", "!"])
@given(st.lists(PATHS, min_size=2, max_size=6, unique=True))
def test_a_pattern_of_a_module_names_it_and_no_other(paths: list[str]) -> None:
    """Whatever characters torch allows in names, in the text too."""
    graph = graph_of_modules(paths)
    for path in paths:
        rule = MeshRule("tp", 2, modules=(pattern_of(path),))
        assert Strategy.parse(Strategy((rule,)).text).mesh == (rule,)
        below = [other == path or other.startswith(f"{path}.") for other in paths]
        assert where(graph, rule.modules).tolist() == [*below, False]
        assert segments(graph, rule.modules) == [path]
    found = patterns(graph)
    inside = [where(graph, weights).tolist()[:-1] for weights in found.weights]
    assert not found.blocks or all(map(any, zip(*inside, strict=True)))


def graph_of_modules(paths: list[str]) -> OpGraph:
    """A training graph with an op and a parameter in each."""
    ops = [Op(f"op{i}", "relu", parameter_bytes=4, module=path) for i, path in enumerate(paths)]
    states = [State(f"w{i}", (f"op{i}",), 4) for i in range(len(paths))]
    return OpGraph.build([*ops, Op("back", "relu", phase=Phase.BACKWARD)], [], states=states)


def test_shares_are_told_apart_by_their_samples(transformer: OpGraph) -> None:
    """Of a batch of 8, shares of 9:8 are even ones, and 9:5 and 9:6 both are 5:3."""
    assert [whole_shares(8, each) for each in ((9, 8), (9, 5), (9, 6))] == [(), (5, 3), (5, 3)]
    moves = [
        move for kind, move in neighbours(transformer, MIXED, Strategy.parse("dp2 shares=5:3")) if kind == "shares"
    ]
    assert len(moves) > 1
    samples = [whole_shares(8, move.mesh[0].shares or (1, 1)) for move in moves]
    assert len(set(samples)) == len(samples)
