"""Split graphs beside torch's own parallel training: the same work, storage and bytes exchanged on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from parallel.fake_group import LocalWork, fake_mesh
from parallel.transformer import Transformer, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from graphs import OpGraph
from graphs.capture import capture
from graphs.transforms.derived import Derived
from graphs.transforms.splitting import split
from graphs.transforms.strategy import Strategy

LAYERS, WIDTH = 2, 32
LOSS = Counter(all_reduce=4)  # DTensor sums the loss itself; ours leaves it a sum, as DistributedDataParallel does
ACTIVATION, NORM = batch()[0].numel() * WIDTH * 4, WIDTH * 4
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


@cache
def step() -> OpGraph:
    return capture(Transformer(WIDTH, layers=LAYERS), batch(), train=True, optimizer="sgd")


def ours(text: str) -> Derived:
    return split(step(), [rule.axis() for rule in Strategy.parse(text).mesh])


def exchanged(derived: Derived) -> Counter[str]:
    """Bytes by kind of collective, each group of ranks once."""
    result: Counter[str] = Counter()
    for collective in derived.collectives:
        result[collective.kind] += collective.bytes
    return result


def local_flops(derived: Derived) -> float:
    """Of the matrix products of the first rank."""
    graph = derived.graph
    return sum(
        flops
        for kind, flops, part in zip(graph.kinds, graph.flops.tolist(), derived.part.tolist(), strict=True)
        if kind in PRODUCTS and part == 0
    )


def local_bytes(model: nn.Module) -> int:
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.nbytes for p in parameters)


def same_work(derived: Derived, work: LocalWork, model: nn.Module) -> None:
    assert local_flops(derived) == work.flops
    assert derived.graph.parameter_bytes[derived.part == 0].sum() == local_bytes(model)


def counted(model: nn.Module, *args: torch.Tensor) -> LocalWork:
    """One training step of rank 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with LocalWork() as work:
        model(*args).backward()
        optimizer.step()
    return work


@pytest.fixture(params=[2, 4])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with fake_mesh(request.param, "ranks") as made:
        yield made


def embedding_by_columns(model: Transformer, mesh: DeviceMesh, after: Replicate | Shard) -> None:
    columns = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    whole = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=after)
    position = distribute_tensor(model.embed.position.data, mesh, [Shard(1)])
    model.embed.position = nn.Parameter(position)
    parallelize_module(model, mesh, {"embed.words": columns, "embed": whole})


def test_data_parallel(mesh: DeviceMesh) -> None:
    derived = ours(f"dp{mesh.size()}")
    model = distribute_module(Transformer(WIDTH, layers=LAYERS), mesh)
    work = counted(model, *(distribute_tensor(x, mesh, [Shard(0)]) for x in batch()))
    same_work(derived, work, model)
    assert exchanged(derived) + LOSS == work.exchanged


def test_tensor_parallel(mesh: DeviceMesh) -> None:
    derived = ours(f"tp{mesh.size()}")
    model = Transformer(WIDTH, layers=LAYERS)
    embedding_by_columns(model, mesh, Replicate())
    columns, rows = ColwiseParallel(), RowwiseParallel()
    once = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "layers.*.attention": once,
        **{f"layers.*.attention.{name}": columns for name in ("query", "key", "value")},
        "layers.*.attention.project": rows,
        "layers.*.expand": columns,
        "layers.*.contract": rows,
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    work = counted(model, *batch())
    same_work(derived, work, model)
    assert exchanged(derived) == work.exchanged


def test_sequence_parallel(mesh: DeviceMesh) -> None:
    derived = ours(f"tp{mesh.size()} sp")
    model = Transformer(WIDTH, layers=LAYERS)
    embedding_by_columns(model, mesh, Shard(1))
    cut = Shard(1)
    columns, rows, norm = (
        ColwiseParallel(),
        RowwiseParallel(output_layouts=cut),
        SequenceParallel(use_local_output=True),
    )
    plan = {
        "layers.*.norm_attention": norm,
        "layers.*.norm_inner": norm,
        "layers.*.attention": PrepareModuleInput(input_layouts=cut, desired_input_layouts=Replicate()),
        **{f"layers.*.attention.{name}": columns for name in ("query", "key", "value")},
        "layers.*.attention.project": rows,
        "layers.*.expand": ColwiseParallel(input_layouts=cut),
        "layers.*.contract": rows,
        "norm": norm,
        "output": ColwiseParallel(input_layouts=cut, output_layouts=cut, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    words, labels = batch()
    work = counted(model, words, distribute_tensor(labels, mesh, [cut]))
    same_work(derived, work, model)
    mine = exchanged(derived)
    # Groups of CPUs have no all-to-all: DTensor gathers the tensor and takes its part.
    mine["all_gather"] += mine.pop("all_to_all")
    # DTensor keeps what it gathered for each product of columns; we gather it again for the backward pass, as
    # Korthikanti et al. (2023, section 4.2.2) do.
    mine["all_gather"] -= (2 * LAYERS + 1) * ACTIVATION
    # The gradient of a bias after rows: we add up each part's words and then the parts; DTensor has the gradient of all
    # words there, for the product's weight, and every rank adds up all of it.
    mine["all_reduce"] -= 2 * LAYERS * NORM
    assert mine + LOSS == work.exchanged
