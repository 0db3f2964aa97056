"""Rings: keys and values go round in blocks; work is conserved, bytes are those of the formula."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from env.fabric import Fabric, Protocol
from graphs import OpGraph
from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.opgraph import Phase
from graphs.records import Work
from graphs.transforms.splitting import Axis, split
from graphs.transforms.splitting.rings import RING_BLOCK, RING_MERGE, SHIFT
from graphs.transforms.strategy import MeshRule, Strategy
from graphs.zoo import build

LAYERS, PARTS = 2, 4


@cache
def step(name: str = "llama3_8b") -> OpGraph:
    made = build(name, small=True, batch_size=4)
    return capture(made.model, made.train_args, train=True)


def ring(parts: int = PARTS) -> Axis:
    return MeshRule("cp", parts, is_ring=True).axis()


def test_blocks_do_the_work_and_shifts_carry_the_keys() -> None:
    derived, whole = split(step(), [ring()]), step()
    graph = derived.graph
    kinds = np.array(graph.kinds)
    attention = np.isin(whole.work, (Work.ATTENTION, Work.ATTENTION_BACKWARD))
    assert graph.flops.sum() == pytest.approx(split(step(), [Axis("cp", PARTS, ("sequence",))]).graph.flops.sum())
    assert graph.flops[kinds == RING_BLOCK].sum() == pytest.approx(whole.flops[attention].sum())
    assert (kinds == RING_BLOCK).sum() == 2 * LAYERS * PARTS * PARTS
    assert (kinds == RING_MERGE).sum() == LAYERS * PARTS * (PARTS - 2 + PARTS - 1)
    # Forward keys and values go round, backward they do again, and their gradients with them.
    shifts = [each for each in derived.collectives if each.kind == SHIFT]
    assert len(shifts) == LAYERS * (PARTS - 1) * 3
    keys = 2 * 4 * 16 * 2 * 4 * 4  # of keys and values: batch, words, heads, width, bytes
    assert {each.bytes for each in shifts} == {keys}
    assert not any(each.kind in ("all_gather", "all_to_all", "reduce_scatter") for each in derived.collectives)


def test_a_block_has_its_share_of_the_keys() -> None:
    graph, whole = split(step(), [ring()]).graph, step()
    blocks = graph.extents[np.array(graph.kinds) == RING_BLOCK]
    before = whole.extents[np.isin(whole.work, (Work.ATTENTION, Work.ATTENTION_BACKWARD))]
    assert {tuple(each) for each in blocks} == {(h, q / PARTS, k / PARTS, w, d) for h, q, k, w, d in before.tolist()}


def test_no_shift_begins_before_the_block_two_before_is_used_nor_backward_before_gradients() -> None:
    graph = split(step(), [ring()]).graph
    producer, consumer, _ = graph.edge_list
    names, phase = graph.op_names, graph.phase
    reads = {names[c]: set() for c in set(consumer.tolist())}
    for p, c in zip(producer.tolist(), consumer.tolist(), strict=True):
        reads[names[c]].add(names[p])
    for op, kind in enumerate(graph.kinds):
        base, _, rest = names[op].rpartition("/shift")
        if kind != SHIFT or "_sum" in rest:
            continue
        number, place = rest.split("@")
        if int(number) > 1:
            assert f"{base}/block{int(number) - 2}@{place}" in reads[names[op]]
        elif phase[op] == Phase.BACKWARD:
            index = {name: i for i, name in enumerate(names)}
            assert any(phase[index[name]] == Phase.BACKWARD for name in reads[names[op]])


def test_a_folded_ring_has_the_shifts_of_one_place() -> None:
    one, every = split(step(), [ring()], folded=True), split(step(), [ring()])
    shifts = [[each.bytes for each in derived.collectives if each.kind == SHIFT] for derived in (one, every)]
    assert shifts[0] == shifts[1]
    part = every.part == 0
    assert one.graph.flops.sum() == pytest.approx(every.graph.flops[part].sum())


def test_texts() -> None:
    assert Strategy.parse("cp4 ring | dp2").text == "dp2 | cp4 ring"
    assert Strategy.parse("cp4 ring").mesh == (MeshRule("cp", 4, is_ring=True),)
    with pytest.raises(StrategyError, match="'cp4 ring ulysses' cannot be; expected 'cp4 ring', or 'cp4 ulysses'"):
        Strategy.parse("cp4 ulysses ring")
    with pytest.raises(StrategyError, match="'ring'"):
        Strategy.parse("tp4 ring")


def test_models_without_attention_in_one_call_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"\('ring'\) of 2, .* no attention .* leave out 'ring'"):
        split(step("rnnlm"), [ring(2)])


def test_a_shift_is_one_round_of_the_ring_of_an_all_gather() -> None:
    """Of 8 ranks on two hosts one of each host sends to the other host, through its own port."""
    fabric = Fabric((Protocol("all_gather", 1e-6, 2e-6, 5e-6, 100e9),))
    size = np.array([8e9])
    assert fabric.knows("shift", 8)
    assert fabric.seconds("shift", size, 8, 1, np.inf) == pytest.approx(1e-6 + 2e-6 + 1e9 / 100e9)
    assert fabric.seconds("shift", size, 8, 2, 4 * 25e9) == pytest.approx(1e-6 + 5e-6 + 1e9 / 25e9)
