"""Named pipeline orders, and graphs whose blocks keep to them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT
from torch import nn
from torch.nn.functional import cross_entropy
from training_steps import chain_of_stages, chunked

from baselines.strategies.applied import applied
from baselines.strategies.orders import ORDERS, PipelineOrder, blocks_before, pipeline_order
from env import Cluster, Plan, Problem, Simulator, audit, check_schedule
from graphs import MismatchError, Op, OpGraph, Phase, Tensor, UnknownNameError
from graphs.capture import capture
from graphs.transforms.sequencing import BARRIER, StageBlock, block_map, sequenced
from graphs.transforms.strategy import Strategy
from graphs.zoo.decoders import Decoder, DecoderConfig


def in_flight(order: PipelineOrder, until: str) -> list[int]:
    """For each device the most micro-batches of a virtual stage between F and B, or F and W."""
    peaks = []
    for blocks in order.sequences:
        counts = np.cumsum([(b.kind == "F") - (until in b.kind) for b in blocks])
        peaks.append(int(counts.max()))
    return peaks


@st.composite
def orders(draw: st.DrawFn, most: int = 7) -> PipelineOrder:
    name = draw(st.sampled_from(sorted(ORDERS)))
    p = draw(st.integers(1, most))
    interleaved = name == "interleaved"
    m = p * draw(st.integers(1, 3)) if interleaved else draw(st.integers(1, 3 * most))
    return pipeline_order(name, p, m, draw(st.integers(1, 4)) if interleaved else 1)


@given(orders())
def test_every_block_is_there_once_on_its_device_and_can_be_carried_out(order: PipelineOrder) -> None:
    blocks = [block for listed in order.sequences for block in listed]
    assert len(set(blocks)) == len(blocks)
    passes = {(kind, b.stage, b.micro_batch) for b in blocks for kind in b.kind}
    assert len(passes) == 3 * len(order.devices) * order.micro_batches
    assert all(order.devices[b.stage] == d for d, listed in enumerate(order.sequences) for b in listed)
    assert sorted(set(order.devices)) == list(range(len(order.sequences)))
    done: set[StageBlock] = set()
    left = [list(listed) for listed in order.sequences]
    while any(left):
        ready = [listed for listed in left if listed and done.issuperset(blocks_before(listed[0], order))]
        assert ready, "a deadlock"
        done.update(listed.pop(0) for listed in ready)


@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 8), (8, 24)])
def test_as_many_micro_batches_are_in_flight_as_the_papers_say(p: int, m: int) -> None:
    assert in_flight(pipeline_order("gpipe", p, m), "B") == [m] * p
    assert in_flight(pipeline_order("1f1b", p, m), "B") == [p - s for s in range(p)]
    assert in_flight(pipeline_order("zb-h1", p, m), "B") == [p - s for s in range(p)]
    assert in_flight(pipeline_order("zb-h1", p, m), "W") == [p] * p
    assert in_flight(pipeline_order("zb-h2", p, m), "B") == [min(m, 2 * (p - s) - 1) for s in range(p)]
    assert max(in_flight(pipeline_order("zb-h2", p, m), "W")) == 2 * p - 1
    # Two virtual stages, each half as large: 2p of them are what 1F1B holds.
    assert in_flight(pipeline_order("zbv", p, m), "W") == [2 * p] * p
    assert max(in_flight(pipeline_order("v-half", p, m), "B")) <= p + 2
    v = 3
    ahead = [min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1) for s in range(p)]
    assert in_flight(pipeline_order("interleaved", p, p * (m // p), v), "B") == ahead


def test_the_orders_of_torch_are_the_same() -> None:
    from torch.distributed.pipelining import schedules as torch_schedules

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "BW", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}

    def of_torch(schedule: type, p: int, m: int, v: int) -> list[list[StageBlock]]:
        facts = SimpleNamespace(
            pp_group_size=p, _n_microbatches=m, num_stages=p * v, n_local_stages=v, microbatches_per_round=p
        )
        rows = [schedule._calculate_single_rank_operations(facts, rank) for rank in range(p)]
        return [
            [
                StageBlock(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in row
                if a is not None
            ]
            for row in rows
        ]

    for p, m in ((2, 4), (4, 8), (4, 12)):
        for name, schedule, v in (
            ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 2),
            ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 3),
            ("zbv", torch_schedules.ScheduleZBVZeroBubble, 2),
        ):
            ours = pipeline_order(name, p, m, v).sequences
            theirs = of_torch(schedule, p, m, v)
            assert [list(blocks) for blocks in ours] == [[b for b in row if b.micro_batch < m] for row in theirs]


def test_a_picture_of_1f1b() -> None:
    assert pipeline_order("1f1b", 2, 3).drawn() == (
        "device 0  F0 F1       B0 W0 F2 B1 W1    B2 W2\ndevice 1     F0 B0 W0 F1 B1 W1 F2 B2 W2"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4), "expected at least one of each"),
        (("interleaved", 4, 6, 2), "there are 6; use a multiple of 4, or 1f1b"),
        (("zbv", 4, 8, 3), "has 2 virtual stages on each device, but 3"),
        (("1f1b", 4, 8, 2), "has 1 virtual stages on each device, but 2"),
    ],
)
def test_what_an_order_cannot_be_made_for(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        pipeline_order(*arguments)


def test_an_unknown_order_lists_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="unknown pipeline order '1f1', did you mean '1f1b'"):
        pipeline_order("1f1", 2, 2)


def test_blocks_tell_gradients_of_weights_from_those_of_inputs() -> None:
    graph, stage = chain_of_stages(2)
    blocks = block_map(chunked(graph, 2), stage)
    named = dict(zip(chunked(graph, 2).graph.op_names, blocks.kind.tolist(), strict=True))
    assert [named[name] for name in ("f1#1", "b1#1", "w1#1", "b3#0", "w3#0")] == [0, 1, 2, 1, 2]
    assert named["u1"] == -1
    # In the first stage nobody waits for the gradient of the input; that of its second layer feeds the first.
    assert [named[name] for name in ("b1#0", "b0#0", "w0#0")] == [1, 2, 2]


def blocks_as_run(order: PipelineOrder, layers: int, cluster: Cluster) -> list[list[StageBlock]]:
    """Blocks of each device by the start of their first op, in a simulated step."""
    graph, stage = chain_of_stages(len(order.devices), layers)
    plain = chunked(graph, order.micro_batches)
    derived, numbers = sequenced(plain, stage, order.sequences)
    device = np.array(order.devices)[stage[derived.origin]]
    _, schedule = Simulator(Problem(derived.graph, cluster)).schedule(Plan(device, numbers))
    blocks = block_map(plain, stage)
    result = []
    for d, wanted in enumerate(order.sequences):
        whole = any(block.kind == "BW" for block in wanted)
        seen: list[StageBlock] = []
        for i in schedule.order.tolist():
            if i < plain.graph.n_ops and device[i] == d and blocks.kind[i] >= 0:
                kind = ("F", "BW", "BW")[blocks.kind[i]] if whole else "FBW"[blocks.kind[i]]
                block = StageBlock(kind, int(blocks.stage[i]), int(blocks.micro_batch[i]))
                if not seen or seen[-1] != block:
                    seen.append(block)
        result.append(seen)
    return result


@given(orders(4), st.integers(1, 3))
@settings(max_examples=40)
def test_a_simulated_step_runs_the_blocks_in_sequence(order: PipelineOrder, layers: int) -> None:
    ran = blocks_as_run(order, layers, Cluster.preset("4xV100-pcie"))
    # A stage may have no op of a kind: one layer at the beginning has no gradient that another op waits for.
    for found, wanted in zip(ran, order.sequences, strict=False):
        assert found == [block for block in wanted if block in set(found)]
        assert {b.stage for b in found} == {b.stage for b in wanted}


def test_without_barriers_the_devices_would_not_wait() -> None:
    """ZB-H1 holds back forward passes that could run: explicit numbers alone do not, barriers do."""
    order = pipeline_order("zb-h1", 4, 8)
    graph, stage = chain_of_stages(4)
    plain = chunked(graph, 8)
    derived, numbers = sequenced(plain, stage, order.sequences)
    simulator = Simulator(Problem(plain.graph, Cluster.preset("4xV100-pcie")))
    _, loose = simulator.schedule(Plan(stage[plain.origin], numbers[: plain.graph.n_ops]))
    _, strict = Simulator(Problem(derived.graph, Cluster.preset("4xV100-pcie"))).schedule(
        Plan(stage[derived.origin], numbers)
    )
    first = {kind: plain.graph.op_names.index(kind) for kind in ("f0#4", "b1#0")}
    assert loose.op_start_s[first["f0#4"]] < loose.op_start_s[first["b1#0"]]
    assert strict.op_start_s[first["f0#4"]] > strict.op_start_s[first["b1#0"]]


def test_barriers_add_nothing_but_order() -> None:
    graph, stage = chain_of_stages(2)
    plain = chunked(graph, 3)
    derived, numbers = sequenced(plain, stage, pipeline_order("1f1b", 2, 3).sequences)
    n = plain.graph.n_ops
    added = derived.graph
    assert added.op_names[:n] == plain.graph.op_names
    assert set(added.kinds[n:]) == {BARRIER}
    assert len(numbers) == added.n_ops == n + 2 * 5  # six blocks on each device
    for key in ("flops", "bytes_moved", "kept_bytes", "workspace_bytes", "kernels"):
        assert getattr(added, key)[n:].sum() == 0
    assert added.tensor_bytes.sum() == plain.graph.tensor_bytes.sum()
    assert added.n_edges > plain.graph.n_edges


def test_one_sequence_serves_every_part_of_a_mesh() -> None:
    graph, stage = chain_of_stages(2)
    single = chunked(graph, 2)
    ops, tensors = single.graph.records()
    both = [replace(op, name=f"{op.name}@{part}", forward_of=None) for part in range(2) for op in ops]
    links = [
        replace(t, producer=f"{t.producer}@{part}", consumers=tuple(f"{c}@{part}" for c in t.consumers))
        for part in range(2)
        for t in tensors
    ]
    doubled = replace(
        single,
        graph=type(graph).build(both, links, "doubled"),
        origin_ptr=np.arange(2 * len(ops) + 1),
        origins=np.tile(single.origins, 2),
        part=np.repeat([0, 1], len(ops)),
        micro_batch=np.tile(single.micro_batch, 2),
        along=np.tile(single.along, 2),
    )
    derived, _ = sequenced(doubled, stage, pipeline_order("1f1b", 2, 2).sequences)
    producer, consumer, _ = derived.graph.edge_list
    assert (derived.part[producer] == derived.part[consumer]).all()
    assert sum(kind == BARRIER for kind in derived.graph.kinds) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (pipeline_order("1f1b", 2, 2).sequences, "which is in no sequence of the order; make the order for as many"),
        ((*pipeline_order("1f1b", 2, 3).sequences, (StageBlock("F", 0, 0),)), "block F0 of stage 0 is twice"),
        (
            tuple(tuple(reversed(blocks)) for blocks in pipeline_order("1f1b", 2, 3).sequences),
            "these sequences of blocks can never be carried out: the graph has a cycle",
        ),
    ],
)
def test_sequences_that_do_not_suit(sequences: tuple[tuple[StageBlock, ...], ...], message: str) -> None:
    graph, stage = chain_of_stages(2)
    with pytest.raises(MismatchError, match=message):
        sequenced(chunked(graph, 3), stage, sequences)


def test_a_stage_for_every_op_is_asked_for() -> None:
    graph, stage = chain_of_stages(2)
    with pytest.raises(MismatchError, match="expected a stage number, -1 or more, for each of 16 ops"):
        block_map(chunked(graph, 2), stage[1:])


@pytest.mark.parametrize("name", ORDERS)
def test_the_pictures_in_the_docs_are_of_these_orders(name: str) -> None:
    page = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    order = pipeline_order(name, 3, 6, 2 if name == "interleaved" else 1)
    shown = page.split(f"### `{name}`\n")[1].split("```\n")[1]
    assert shown == order.drawn() + "\n"


def test_a_tied_embedding_stands_outside_the_pipeline() -> None:
    """The embedding runs on the last stage's device, with the head whose weights it shares."""
    ops = [
        Op("embed", flops=1.0),
        Op("f0", flops=1.0),
        Op("head", flops=1.0),
        Op("head/backward", phase=Phase.BACKWARD, forward_of="head", flops=1.0),
        Op("head/weight", phase=Phase.BACKWARD, forward_of="head", flops=1.0),
        Op("f0/backward", phase=Phase.BACKWARD, forward_of="f0", flops=1.0),
        Op("embed/weight", phase=Phase.BACKWARD, forward_of="embed", flops=1.0),
        Op("sum", phase=Phase.BACKWARD, flops=1.0),
        Op("update", phase=Phase.UPDATE, flops=1.0),
    ]
    edges = ["embed f0", "f0 head", "head head/backward", "head/backward f0/backward", "f0/backward embed/weight"]
    edges += ["head head/weight", "head/weight sum", "embed/weight sum", "sum update"]
    tensors = [Tensor(producer, 4, (consumer,)) for producer, consumer in (edge.split() for edge in edges)]
    graph = OpGraph.build(ops, tensors)
    stage = np.array([1, 0, 1, 1, 1, 0, 1, 1, 1])
    derived = chunked(graph, 4)
    blocks = block_map(derived, stage)
    outside = {name for name, kind in zip(derived.graph.op_names, blocks.kind.tolist(), strict=True) if kind < 0}
    assert outside == {f"{name}#{i}" for name in ("embed", "embed/weight", "sum") for i in range(4)} | {"update"}
    sequenced(derived, stage, pipeline_order("1f1b", 2, 4).sequences)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv"])
def test_the_checker_and_the_reference_take_pipelines_as_they_are(name: str) -> None:
    order = pipeline_order(name, 4, 5)
    graph, stage = chain_of_stages(len(order.devices))
    derived, numbers = sequenced(chunked(graph, 5), stage, order.sequences)
    problem = Problem(derived.graph, Cluster.preset("4xV100-pcie"))
    plan = Plan(np.array(order.devices)[stage[derived.origin]], numbers)
    score, schedule = Simulator(problem).schedule(plan)
    assert check_schedule(problem.graph, problem.cluster, schedule, plan) == []
    found = audit(problem.graph, problem.cluster, plan)
    assert found.problems == ()
    assert found.step_time_s == pytest.approx(score.step_time_s, rel=1e-12)
    assert list(found.peak_bytes.values()) == score.peak_bytes.tolist()


@pytest.fixture(scope="module")
def decoder() -> OpGraph:
    """Four layers with rotary tables, of 1,024 words of which several micro-batches can be made."""
    config = DecoderConfig(4, 1024, 2, 1024, heads=8, key_value_heads=4, inner_width=4096, vocabulary=256)
    with torch.device("meta"):
        words = torch.zeros(8, 1024, dtype=torch.long)
        return capture(Decoder(config), (words, words), train=True)


@pytest.mark.parametrize(
    "text", ["cp2 | pp2 1f1b mb4", "cp2 | pp2 1f1b mb4 | tp2 sp", "cp2 | pp2 interleaved v2 mb4 | tp2 sp"]
)
def test_blocks_keep_all_ops_of_micro_batches_where_sequences_are_cut(decoder: OpGraph, text: str) -> None:
    """Rotary tables are gathered once for the step, for each pass, and wait for no micro-batch."""
    made = applied(decoder, Cluster.preset("8xH100-nvswitch"), Strategy.parse(text), folded=True)
    derived = made.unordered
    stage = np.zeros(derived.source.n_ops, dtype=np.int64)
    stage[derived.origin] = made.stage[: derived.graph.n_ops]
    blocks = block_map(derived, stage)
    assert stage.max() == (3 if "v2" in text else 1)
    assert (blocks.kind[(derived.micro_batch >= 0) & (derived.graph.phase != Phase.UPDATE)] >= 0).all()


def test_stages_send_each_other_parts_of_sequences(decoder: OpGraph) -> None:
    """What the earlier stage's products read whole, forward or backward, is gathered there."""
    cluster = Cluster.preset("2x8xH100-ib")
    made = applied(decoder, cluster, Strategy.parse("dp4 | pp2 1f1b mb2 | tp2 sp"), folded=True)
    _, schedule = Simulator(made.problem).schedule(made.plan)
    names = [device.name.split(".")[0] for device in made.problem.cluster.devices]
    ends = zip(schedule.transfer_source.tolist(), schedule.transfer_target.tolist(), strict=True)
    between = np.array([names[source] != names[target] for source, target in ends])
    sent = made.problem.graph.tensor_bytes[schedule.transfer_tensor[between]]
    part = 1024 * 1024 * 2 // 2  # bfloat16, of the one sample of a micro-batch
    assert sent.max() == part


class Tied(nn.Module):
    """Words [N, T] to a loss; the head's weights are the embedding's, where they are tied."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 512)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(32)))
        self.head = nn.Linear(512, 4096, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.layers(self.embed(words))).flatten(0, 1), words.flatten())


def test_a_tied_table_takes_no_more_memory_for_more_micro_batches() -> None:
    """By hand: parts of the table, its state and gradients that a pipeline's depth of micro-batches makes."""
    peaks = []
    for micro_batches in (8, 32):
        with torch.device("meta"):
            graph = capture(Tied(), (torch.zeros(8 * micro_batches, 512, dtype=torch.long),), train=True)
        strategy = Strategy.parse(f"pp4 1f1b mb{micro_batches} | tp2")
        made = applied(graph, Cluster.preset("8xH100-nvswitch"), strategy, folded=True)
        peaks.append(Simulator(made.problem).score(made.plan).peak_bytes[:4])
    few, many = peaks
    assert many == pytest.approx(few, rel=0.05)
    table, sample = 4096 * 512 * 4 // 2, 8 * 512 * 512 * 4
    layers = 32 * (512 * 512 + 512) * 4 // 2
    assert many[-1] < 4 * (table + layers / 8) + 5 * table + 8 * 512 * 4096 * 4 * 1.5 + 12 * sample


@pytest.mark.parametrize("stages", [2, 8])
def test_a_tied_table_takes_what_two_take(stages: int) -> None:
    """In the first stage and in the last one, whatever lies between them, as every framework keeps a copy in each."""
    peaks = []
    for is_tied in (True, False):
        with torch.device("meta"):
            model, words = Tied(is_tied), torch.zeros(128, 512, dtype=torch.long)
            graph = capture(model, (words,), train=True)
        strategy = Strategy.parse(f"pp{stages} 1f1b mb16")
        made = applied(graph, Cluster.preset("8xH100-nvswitch"), strategy)
        peaks.append(Simulator(made.problem).score(made.plan).peak_bytes[:stages])
    tied, untied = peaks
    table = 4096 * 512 * 4
    assert tied[0] == pytest.approx(untied[0], rel=0.02)
    # The last stage adds up what comes from the first one before both are one gradient.
    assert 0.9 * untied[-1] <= tied[-1] < untied[-1] + 2.2 * table
