"""Split graphs beside torch's own parallel training: the same work, storage and bytes exchanged on every rank."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import replicas_worker
import torch
from parallel.fake_group import LocalWork, fake_mesh
from parallel.transformer import Transformer, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from graphs import OpGraph
from graphs.capture import capture
from graphs.transforms.collectives import bucketed
from graphs.transforms.derived import Derived
from graphs.transforms.splitting import Axis, Zero, split
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


def check_loss(mine: Counter[str], work: LocalWork, parts: int) -> None:
    """All but the loss is the same.

    DTensor's `loss_parallel` has three all-reduces of a number a word, for the maximum, the sum and the scores of
    labels; we gather a number a word of each part in each pass, and leave the loss a sum.
    """
    words = batch()[1].numel() * 4
    assert mine["all_gather"] - 2 * parts * words == work.exchanged["all_gather"]
    assert mine["all_reduce"] == work.exchanged["all_reduce"] - 3 * words
    assert mine["reduce_scatter"] == work.exchanged["reduce_scatter"]


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
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    words, labels = batch()
    with loss_parallel():
        work = counted(model, words, distribute_tensor(labels, mesh, [Replicate()]))
    same_work(derived, work, model)
    check_loss(exchanged(derived), work, mesh.size())


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
        "output": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    words, labels = batch()
    with loss_parallel():
        work = counted(model, words, distribute_tensor(labels, mesh, [Replicate()]))
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
    check_loss(mine, work, mesh.size())


def test_fsdp2_on_groups_of_replicas_exchanges_the_same() -> None:
    """On a mesh of two dimensions: inside a group as `test_fsdp2_gathers_and_scatters_the_same`, and between groups."""
    derived = split(step(), [Axis("rp", 2, ("batch",)), Axis("dp", 2, ("batch",))], zero=Zero(3))
    with fake_mesh(4, "ranks"):
        mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rp", "dp")), Transformer(WIDTH, layers=LAYERS)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        with replicas_worker.Exchanged() as theirs:
            model(*(part.chunk(4)[0] for part in batch())).backward()
    mine = exchanged(derived)  # of two groups along each axis
    assert mine["reduce_scatter"] == 2 * total(theirs.made)["reduce_scatter"] > 0
    assert mine["all_reduce"] == 2 * total(theirs.made)["all_reduce"] > 0


# -- two processes -----------------------------------------------------------------------------------------------------

Exchanges = list[tuple[str, int]]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exchanges]:
    """What two processes exchange in a step, by how they share it: kind and bytes of each collective."""
    folder = tmp_path_factory.mktemp("replicas")
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=replicas_worker.work, args=(rank, folder)) for rank in (0, 1)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    found = json.loads((folder / "exchanged.json").read_text())
    return {how: [(kind, size) for kind, size in made] for how, made in found.items()}


def total(made: Exchanges) -> Counter[str]:
    result: Counter[str] = Counter()
    for kind, size in made:
        result[kind] += size
    return result


def test_distributed_data_parallel_fills_the_same_buckets(replicas: dict[str, Exchanges]) -> None:
    derived = bucketed(ours("dp2"), replicas_worker.BUCKET_BYTES)
    mine = [(collective.kind, collective.bytes) for collective in derived.collectives]
    assert total(mine) == total(replicas["replicated"])
    assert len(mine) == len(replicas["replicated"]) > 1
    for (_, size), (_, theirs) in zip(mine, replicas["replicated"], strict=True):
        assert abs(size - theirs) <= NORM  # of two gradients that one op makes, either may come first


def test_fsdp2_gathers_and_scatters_the_same(replicas: dict[str, Exchanges]) -> None:
    derived = split(step(), [Axis("dp", 2, ("batch",))], zero=Zero(3))
    # It gathers whole layers again for the backward pass; we only what that pass reads: no embedding, and of linear
    # layers no bias.
    kept = {"layers", "norm_attention", "norm_inner", "norm", "output"}
    parameters = [(name.split("."), p.nbytes) for name, p in Transformer().named_parameters()]
    not_gathered = sum(
        size for path, size in parameters if path[0] == "embed" or (path[-1] == "bias" and path[-2] not in kept)
    )
    mine = exchanged(derived)
    mine["all_gather"] += not_gathered
    assert mine == total(replicas["sharded"])


def test_fsdp2_pads_rows_that_do_not_divide(replicas: dict[str, Exchanges]) -> None:
    """FSDP2 cuts by rows, of which every rank has as many as the first; we cut by bytes, and pad nothing."""
    graph = capture(nn.Linear(4, 5), (torch.ones(2, 4, requires_grad=True),), train=True, optimizer="sgd")
    derived = split(graph, [Axis("dp", 2, ("batch",))], zero=Zero(3))
    whole, rows_of_six = (5 * 4 + 5) * 4, (6 * 4 + 6) * 4
    assert exchanged(derived)["reduce_scatter"] == whole
    assert total(replicas["padded"])["reduce_scatter"] == rows_of_six


def test_convolutions_gather_their_weights_for_the_backward_pass_too() -> None:
    """One op writes the gradients of input and weight, and reads the weight for the first of them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False))
    graph = capture(model, (torch.ones(4, 3, 8, 8),), train=True, optimizer="sgd")
    derived = split(graph, [Axis("dp", 2, ("batch",))], zero=Zero(3))
    first, second = (p.nbytes for p in model.parameters())
    assert exchanged(derived)["all_gather"] == first + 2 * second
