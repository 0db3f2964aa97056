"""What sequence parallelism gathers a second time is gathered when the backward pass needs it, and not sooner."""

from __future__ import annotations

import numpy as np
import pytest
from parallel.transformer import Transformer, batch

from graphs.capture import capture
from graphs.opgraph import Phase
from graphs.transforms.splitting import Axis, split


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_second_gathers_wait_for_a_gradient(micro_batches: int) -> None:
    graph = capture(Transformer(), (*batch(),), train=True)
    derived = split(graph, [Axis("tp", 2, (), sequence=True)], micro_batches)
    made = derived.graph
    producer, reader, tensor = made.edge_list
    backward = made.phase != Phase.FORWARD
    seconds = [c for c in derived.collectives if c.kind == "all_gather" and backward[c.ops[0]]]
    firsts = [c for c in derived.collectives if c.kind == "all_gather" and not backward[c.ops[0]]]
    # Inputs of attention and of the first product, in two layers, and of the last product.
    assert len([c for c in seconds if not backward[producer[reader == c.ops[0]]].all()]) == 5 * micro_batches
    assert len(firsts) >= 5 * micro_batches
    for collective in seconds:
        for op in collective.ops:
            read = (reader == op) & (derived.part[producer] == derived.part[op])
            gates = read & backward[producer]
            assert gates.any()
            if not backward[producer[read]].all():  # what is gathered is of the forward pass, what it waits for empty
                assert (made.tensor_bytes[tensor[gates]] == 0).all()
                waits_for = derived.micro_batch[producer[gates]]
                assert np.isin(waits_for, (-1, derived.micro_batch[op])).all()
    assert len(made.topological_order) == made.n_ops
