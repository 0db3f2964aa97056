"""A placement handed to other tools: device maps, plain JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import Op, OpGraph
from graphs.opgraph import Tensor as Edge
from placement.cli import run
from placement.exporters import module_ranges
from placement.exporters.exporting import TARGETS
from placement.exporters.module_ranges import Needs
from placement.solving.answer import order_by_device
from placement.solving.result import Result


def cluster_of(*kinds: str) -> Cluster:
    """Devices d0, d1, ... of these kinds, of 1 FLOP/s each, all linked."""
    devices = tuple(Device(f"d{i}", kind, 10**9, {"float32": 1.0}, 1e9) for i, kind in enumerate(kinds))
    pairs = itertools.combinations(devices, 2)
    return Cluster("test", devices, tuple(link for a, b in pairs for link in both_ways(a.name, b.name, 1e9, 0.0)))


GPUS = cluster_of("gpu", "gpu")


def placed(graph: OpGraph, devices: Sequence[int], cluster: Cluster = GPUS) -> Result:
    """A result with this placement, each colocation group where its first op is. Its figures are of another one."""
    numbers = np.array(devices, dtype=np.int64)
    for group in set(graph.colocation.tolist()) - {-1}:
        members = np.flatnonzero(graph.colocation == group)
        numbers[members] = numbers[members[0]]
    names = [cluster.devices[d].name for d in numbers]
    alone = placement.optimize(graph, cluster, "single_device", seed=0)
    answer = dataclasses.replace(
        alone.answered(),
        placement=dict(zip(graph.op_names, names, strict=True)),
        order=order_by_device(graph, cluster, numbers, graph.topological_order.tolist()),
    )
    return dataclasses.replace(alone, answer=answer)


def placed_model(
    model: nn.Module, args: tuple[Tensor, ...], where: Callable[[str], int], train: bool = False
) -> Result:
    """A model with each op where a function of its module says."""
    graph = placement.capture(model, args, train=train)
    return placed(graph, [where(module) for module in graph.modules])


def line(*ops: tuple[str, float, int], **options: Any) -> Result:
    """Ops in a row, (module, FLOPs, device), that keep bytes."""
    records = [Op(f"op{i}", flops=flops, kept_bytes=8, module=module) for i, (module, flops, _) in enumerate(ops)]
    edges = [Edge(a.name, 8, (b.name,)) for a, b in itertools.pairwise(records)]
    return placed(OpGraph.build(records, edges), [device for *_, device in ops], **options)


def places(model: nn.Module, device_map: dict[str, int | str]) -> dict[str, int | str]:
    """Where each parameter and buffer goes; each must be covered by one entry."""
    found = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, _ in named:
        entries = [e for e in device_map if e in ("", name) or name.startswith(f"{e}.")]
        assert len(entries) == 1, (name, entries)
        found[name] = device_map[entries[0]]
    return found


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


# -- device maps: entries -----------------------------------------------------------------------------------------


def test_modules_on_one_device_become_one_entry() -> None:
    result = line(("a.x", 1, 0), ("a.y", 1, 0), ("b.x", 1, 0), ("b.y", 1, 1), ("c", 1, 1))
    assert placement.export(result, "device_map") == {"a": 0, "b.x": 0, "b.y": 1, "c": 1}
    assert placement.export(line(("a.x", 1, 1), ("b", 1, 1)), "device_map") == {"": 1}


def test_gpus_are_numbered_and_everything_else_is_the_cpu() -> None:
    cluster = cluster_of("cpu", "gpu", "cpu", "gpu")
    result = line(("a", 1, 0), ("b", 1, 2), ("c", 1, 1), ("d", 1, 3), cluster=cluster)
    assert placement.export(result, "device_map") == {"a": "cpu", "b": "cpu", "c": 0, "d": 1}
    same = line(("a", 1, 0), ("b", 1, 2), cluster=cluster)
    assert placement.export(same, "device_map") == {"": "cpu"}


def test_a_module_goes_where_most_of_its_time_is_spent() -> None:
    result = line(("a", 1, 0), ("a", 1, 0), ("a", 3, 1), ("b", 1, 0))
    assert placement.export(result, "device_map") == {"a": 1, "b": 0}


def test_modules_that_share_a_parameter_go_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.between(self.first(x)))
            return out

    model = Tied()
    result = placed_model(model, (torch.zeros(2, dtype=torch.long),), lambda module: int(module == "between"))
    expected = {"first": 0, "between": 1, "last": 0}
    assert placement.export(result, "device_map") == expected
    assert placement.export(result, "device_map", model=model) == expected
    # The placement of a model without the tie knows of none: the model does.
    apart = line(("first", 1, 0), ("between", 1, 1), ("last", 3, 1))
    assert placement.export(apart, "device_map") == {"first": 0, "between": 1, "last": 1}
    assert placement.export(apart, "device_map", model=model) == {"": 1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Stack(nn.Module):
    """Two layers between parameters of the model itself, and a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.shift = nn.Parameter(torch.zeros(4))
        self.pooler = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.shift


X = (torch.randn(3, 4),)


def second_half(module: str) -> int:
    return int(module in ("", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down"))


def test_classes_that_must_not_be_split_are_whole() -> None:
    model = Stack()
    result = placed_model(model, X, second_half)
    split = placement.export(result, "device_map", model=model, no_split=[])
    assert split == {"layers.0.up": 0, "layers.0.down": 1, "layers.1": 1, "shift": 1, "pooler": 1}
    whole = placement.export(result, "device_map", model=model, no_split=["Layer"])
    assert whole == {"layers.0": 0, "layers.1": 1, "shift": 1, "pooler": 1}
    model._no_split_modules = ["Layer", "Unheard"]  # type: ignore[assignment]
    assert placement.export(result, "device_map", model=model) == whole
    with pytest.raises(UnknownNameError, match="unknown class of modules in Stack 'layer', did you mean 'Layer'"):
        placement.export(result, "device_map", model=model, no_split="layer")
    with pytest.raises(MismatchError, match="give the model"):
        placement.export(result, "device_map", no_split=["Layer"])


def test_parameters_of_the_model_itself_need_the_model() -> None:
    with pytest.raises(MismatchError, match="outermost module of 'Stack' holds parameters of its own"):
        placement.export(placed_model(Stack(), X, second_half), "device_map")
    assert placement.export(placed_model(Stack(), X, lambda _: 1), "device_map") == {"": 1}


def test_a_module_whose_weights_another_one_uses_goes_with_it() -> None:
    model = nn.Sequential(Block(8), nn.Linear(8, 8))  # the attention uses the weight of its out_proj
    result = placed_model(model, (torch.randn(1, 3, 8),), lambda module: int(module == "1"))
    assert placement.export(result, "device_map") == {"0": 0, "1": 1}
    assert placement.export(result, "device_map", model=model) == {"0": 0, "1": 1}


# -- device maps: what hooks cannot move --------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.first(x))
        return out


def test_a_module_that_adds_its_input_to_its_output_is_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual())
    result = placed_model(model, X, lambda module: int(module in ("1", "1.inner.0", "1.inner.1")))
    assert placement.export(result, "device_map", model=model) == {"0": 0, "1": 1}


def test_branches_end_on_one_device() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            self.right = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.left(x) + self.right(x)
            return out

    result = placed_model(Towers(), X, lambda module: int(module.startswith("right")))
    found = placement.export(result, "device_map")
    assert found == {"left": 0, "right.0": 1, "right.1": 0}


class Mixed(nn.Module):
    """A bit of everything; its inputs are [1, 3, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.ends = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.ends["b"].weight = self.middle[0].weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.middle(x) * self.scale
        out: Tensor = self.ends["a"](x) - self.ends["b"](x)
        return out


@pytest.fixture(scope="module", params=[False, True], ids=["inference", "training"])
def mixed(request: pytest.FixtureRequest) -> tuple[nn.Module, OpGraph]:
    model = Mixed()
    return model, placement.capture(model, (torch.randn(1, 3, 8),), train=request.param)


@settings(max_examples=25)
@given(data=st.data())
def test_any_placement_gives_a_map_that_can_run(mixed: tuple[nn.Module, OpGraph], data: Any) -> None:
    model, graph = mixed
    devices = data.draw(st.lists(st.integers(0, 2), min_size=graph.n_ops, max_size=graph.n_ops))
    no_split = data.draw(st.sampled_from([[], ["Block"], ["Sequential"], ["MultiheadAttention", "Mixed"]]))
    result = placed(graph, devices, cluster_of("gpu", "cpu", "gpu"))
    found = placement.export(result, "device_map", model=model, no_split=no_split)
    where = places(model, found)
    assert set(where.values()) <= {0, 1, "cpu"}
    assert where["ends.b.weight"] == where["middle.0.weight"]
    for path, module in model.named_modules():
        if type(module).__name__ in no_split or isinstance(module, nn.MultiheadAttention):
            assert len({place for name, place in where.items() if name.startswith(path)}) == 1
    run_like_hooks(model, found)
    run_like_hooks(model, placement.export(result, "device_map", model=model, no_split=[]))


def run_like_hooks(model: nn.Module, device_map: dict[str, int | str]) -> None:
    """Run as accelerate would: the modules of the map move what they are called with; nothing else moves.

    Tensors say which device they are on by a subclass, so that this needs no devices.
    """
    where = places(model, device_map)
    parameters = {id(p): where[name] for name, p in model.named_parameters(remove_duplicate=False)}
    hooks = []
    for path, place in device_map.items():
        modules = dict(model.named_modules())
        called = modules[path].modules() if path in modules else ()
        # As accelerate does; a list of modules, say, is never called itself.
        hooks += [
            module.register_forward_pre_hook(_mover(place), with_kwargs=True)
            for module in called
            if module.state_dict()
        ]
    On.parameters = parameters
    try:
        model.eval()
        model(On(torch.randn(1, 3, 8), None))
    finally:
        for hook in hooks:
            hook.remove()
        model.train()


def _mover(place: int | str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def move(value: Any) -> Any:
        return On(value.as_subclass(Tensor), place) if isinstance(value, Tensor) else value

    return lambda _, args, kwargs: (tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()})


class On(Tensor):
    """A tensor that is said to be somewhere; None: an input, which may be anywhere."""

    parameters: dict[int, int | str]
    place: int | str | None

    def __new__(cls, data: Tensor, place: int | str | None) -> On:
        made = data.as_subclass(cls)
        made.place = place
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, types, args, kwargs)
        found = {
            place
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
            and (place := getattr(leaf, "place", None) if isinstance(leaf, On) else cls.parameters.get(id(leaf)))
            is not None
        }
        assert len(found) <= 1, f"{function} reads from {found}"
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, On):
                leaf.place = next(iter(found), None)
        return out


# -- within memory ------------------------------------------------------------------------------------------------


def with_memory(cluster: Cluster, *sizes: int) -> Cluster:
    """The first devices of a cluster, with so many bytes each."""
    devices = [
        dataclasses.replace(device, memory_bytes=size) for device, size in zip(cluster.devices, sizes, strict=False)
    ]
    names = {device.name for device in devices}
    return Cluster(cluster.name, tuple(devices), tuple(link for link in cluster.links if {link.src, link.dst} <= names))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(a, b, bias=False) for a, b in ((8, 32), (8, 32), (32, 8)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def stretched(model: nn.Module, device_map: dict[str, int | str]) -> list[int | str]:
    """The places of the parameters in the order of the model, each run of equal ones once."""
    return [place for place, _ in itertools.groupby(places(model, device_map).values())]


def bytes_in(model: nn.Module, device_map: dict[str, int | str], place: int | str) -> int:
    where, tensors = places(model, device_map), model.state_dict(keep_vars=True)
    held = {id(tensors[name]): tensors[name].nbytes for name in tensors if where[name] == place}
    return sum(held.values())


@pytest.mark.parametrize("with_model", [True, False])
def test_a_map_fits_and_does_not_alternate(with_model: bool) -> None:
    """Voting by time puts six or seven of ten blocks, or every other one, on a device that has room for five."""
    model = nn.Sequential(*(Gated() for _ in range(10)))
    graph = placement.capture(model, (torch.zeros(4, 8),))
    block, room = 3 * 8 * 32 * 4, int(graph.tensor_bytes.max()) * 6
    for where in (lambda i: i % 2, lambda i: int(i < 3)):
        result = placed(graph, [where(int(module.partition(".")[0] or 0)) for module in graph.modules])
        for memory, most in ((5 * block + room, 5), (6 * block + room, 6)):
            tight = dataclasses.replace(result, cluster=with_memory(GPUS, memory, memory))
            found = placement.export(tight, "device_map", model=model if with_model else None)
            assert len(stretched(model, found)) == 2
            for place in (0, 1):
                assert bytes_in(model, found, place) <= most * block
                need, usable = found.taken[place]
                assert bytes_in(model, found, place) < need <= usable == memory
            assert 0 < found.moved_ops < found.ops
        tight = dataclasses.replace(result, cluster=with_memory(GPUS, 4 * block + room, 5 * block + room))
        with pytest.raises(
            InfeasibleError, match=r"one stretch of the modules each fits: .* lacks .*; use more or larger"
        ):
            placement.export(tight, "device_map", model=model if with_model else None)
        # A device that the placement does not use may take the rest.
        three = dataclasses.replace(
            result, cluster=with_memory(cluster_of("gpu", "gpu", "gpu"), *[4 * block + room] * 3)
        )
        assert stretched(model, placement.export(three, "device_map", model=model))[-1] == 2


def test_what_a_device_lacks_is_said() -> None:
    result = line(("a", 1, 0), ("b", 1, 0), ("c", 1, 1))  # each keeps 8 bytes, and makes 8
    tight = dataclasses.replace(result, cluster=with_memory(GPUS, 24, 24))
    with pytest.raises(
        InfeasibleError, match=r"parameters and activations counted, at best d. lacks 8 bytes beside the 24 bytes"
    ):
        placement.export(tight, "device_map")
    fits = dataclasses.replace(result, cluster=with_memory(GPUS, 32, 24))  # two kept, and what an op reads and makes
    assert placement.export(fits, "device_map") == {"a": 0, "b": 0, "c": 1}


def test_parameters_that_no_op_uses_count() -> None:
    model = Stack()
    model.pooler = nn.Linear(4, 1000)
    result = placed_model(model, X, second_half)
    tight = dataclasses.replace(result, cluster=with_memory(GPUS, 10_000, 1000))
    with pytest.raises(InfeasibleError, match="d0 lacks"):
        placement.export(tight, "device_map", model=model)
    roomy = dataclasses.replace(result, cluster=with_memory(GPUS, 41_000, 1000))
    assert placement.export(roomy, "device_map", model=model) == {"": 0}


# -- device maps: transformers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert() -> tuple[Any, tuple[Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    return transformers.BertForMaskedLM(config).eval(), (torch.randint(0, 50, (2, 8)),)


def halves(graph: OpGraph) -> list[int]:
    return (graph.topological_position >= graph.n_ops // 2).astype(int).tolist()


def test_transformers_reads_the_map_as_it_is_meant(bert: tuple[Any, tuple[Tensor, ...]]) -> None:
    from transformers.integrations.accelerate import expand_device_map

    model, args = bert
    graph = placement.capture(model, args)
    found = placement.export(placed(graph, halves(graph)), "device_map", model=model)
    assert set(found.values()) == {0, 1}
    where = places(model, found)
    names = list(model.state_dict())
    assert expand_device_map(found, names) == {name: where[name] for name in names}
    tied = ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]
    assert len({where[name] for name in tied}) == 1
    for path, module in model.named_modules():
        if type(module).__name__ in model._no_split_modules:
            assert len({place for name, place in where.items() if name.startswith(f"{path}.")}) == 1


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_transformers_loads_a_model_with_the_map(bert: tuple[Any, tuple[Tensor, ...]], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, args = bert
    graph = placement.capture(model, args)
    found = placement.export(placed(graph, halves(graph)), "device_map", model=model)
    model.save_pretrained(tmp_path / "saved")
    # Without two GPUs, the disk is a second place to be.
    stand_ins = {path: "disk" if place == 1 else "cpu" for path, place in found.items()}
    loaded = type(model).from_pretrained(
        tmp_path / "saved", device_map=stand_ins, offload_folder=str(tmp_path / "offloaded")
    )
    assert 0 < sum(parameter.is_meta for parameter in loaded.parameters()) < len(list(loaded.parameters()))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(*args).logits, model(*args).logits)


@pytest.fixture(scope="module", params=["Llama", "Mixtral"])
def decoder(request: pytest.FixtureRequest) -> tuple[Any, Result]:
    """A decoder of six layers on two of four devices that have room for two fifths of it each."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = getattr(transformers, f"{request.param}Config")(vocab_size=100, num_key_value_heads=2, **sizes)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    graph = placement.capture(model, (torch.randint(0, 99, (1, 8)),), {"use_cache": False})
    memory = int(graph.kept_bytes.sum()) * 2 // 5
    # As a plan for the latency does: attention here, the rest there.
    result = placed(graph, ["attn" in module for module in graph.modules], cluster_of(*["gpu"] * 4))
    return model, dataclasses.replace(result, cluster=with_memory(result.cluster, *[memory] * 4))


def test_decoders_fit_their_devices(decoder: tuple[Any, Result]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, result = decoder
    found = placement.export(result, "device_map", model=model)
    accelerate.utils.check_device_map(model, found)
    sizes = accelerate.utils.compute_module_sizes(model)
    capacity = result.cluster.devices[0].memory_bytes
    for place in set(found.values()):
        assert sum(sizes[path] for path, where in found.items() if where == place) <= capacity
    layers = [found[f"model.layers.{i}"] for i in range(6)]
    assert len(set(layers)) == len(list(itertools.groupby(layers))) >= 2
    small = dataclasses.replace(result, cluster=with_memory(result.cluster, *[capacity // 2] * 4))
    with pytest.raises(InfeasibleError, match="lacks"):
        placement.export(small, "device_map", model=model)


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_decoders_are_loaded_with_the_map(decoder: tuple[Any, Result], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, result = decoder
    found = placement.export(result, "device_map", model=model)
    model.save_pretrained(tmp_path / "saved")
    stand_ins = {path: "cpu" if place == found["lm_head"] else "disk" for path, place in found.items()}
    loaded = type(model).from_pretrained(
        tmp_path / "saved", device_map=stand_ins, offload_folder=str(tmp_path / "offloaded")
    )
    resident = sum(parameter.nbytes for parameter in loaded.parameters() if not parameter.is_meta)
    assert 0 < resident <= result.cluster.devices[0].memory_bytes
    tokens = torch.randint(0, 99, (1, 8))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits)


@settings(max_examples=80)
@given(data=st.data())
def test_cuts_are_the_best_there_are(data: Any) -> None:
    def draw(size: int, most: int) -> NDArray[np.int64]:
        return np.array(data.draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), dtype=np.int64)

    n = data.draw(st.integers(1, 6))
    needed = Needs(draw(n, 9), draw(n, 5))
    moved_s, usable = draw(3 * n, 5).reshape(3, n).astype(float), draw(3, 40) + 1

    def taken(begin: int, end: int) -> int:
        return int(needed.kept[begin:end].sum() + needed.room[begin:end].max(initial=0))

    def badness(bounds: Sequence[int]) -> tuple[int, float]:
        spans = list(enumerate(itertools.pairwise(bounds)))
        lacking = sum(max(taken(begin, end) - int(usable[i]), 0) for i, (begin, end) in spans if begin < end)
        return lacking, sum(moved_s[i, begin:end].sum() for i, (begin, end) in spans)

    found = module_ranges.cut(needed, moved_s, usable, (0, 1, 2))
    inner = itertools.combinations_with_replacement(range(n + 1), 2)
    best = min(badness((0, *cuts, n)) for cuts in inner)
    assert badness(found.bounds)[0] == best[0]
    if not best[0]:
        assert found.moved_s == pytest.approx(best[1])
    for need, (begin, end) in zip(found.taken, itertools.pairwise(found.bounds), strict=True):
        assert need == (taken(begin, end) if begin < end else 0)
    # Exchanging devices, and those that the placement does not use, may only help.
    better = module_ranges.nearest(needed, moved_s, usable, [0, 1, 2])
    assert module_ranges._badness(better) <= module_ranges._badness(found)


# -- JSON, and what cannot be exported ----------------------------------------------------------------------------


def test_json_has_everything(tmp_path: Path) -> None:
    result = line(("a", 1, 0), ("a", 3, 1), ("b", 1, 0))
    found = json.loads(json.dumps(placement.export(result, "json")))
    assert (found["schema"], found["version"]) == ("placement.export", 1)
    assert found["graph"] == {"name": "graph", "hash": result.graph_hash}
    assert found["cluster"] == {"name": "test", "hash": result.cluster_hash}
    assert found["ops"] == {"op0": "d0", "op1": "d1", "op2": "d0"}
    assert found["order"] == {"d0": ["op0", "op2"], "d1": ["op1"]}
    assert found["modules"] == {"a": "d1", "b": "d0"}
    assert [device["kind"] for device in found["devices"]] == ["gpu", "gpu"]


def test_what_cannot_be_exported() -> None:
    good = line(("a", 1, 0), ("b", 1, 1))
    with pytest.raises(UnknownNameError, match="unknown target 'device-map', did you mean 'device_map'"):
        placement.export(good, "device-map")
    none = dataclasses.replace(good, answer=None, reason="it is too large.")
    for target in TARGETS:
        with pytest.raises(InfeasibleError, match="so there is none to export: it is too large"):
            placement.export(none, target)
    nameless = line(("", 1, 0), ("", 1, 1))
    with pytest.raises(MismatchError, match="does not say which module its ops are from"):
        placement.export(nameless, "device_map")
    with pytest.raises(MismatchError, match=r"a module '[ab]', which Stack does not have"):
        placement.export(good, "device_map", model=Stack())
    assert placement.export(nameless, "json")["modules"] == {"": "d0"}
    with pytest.raises(MismatchError, match="no_split is for device maps"):
        placement.export(good, "json", no_split=["Layer"])
    with pytest.raises(MismatchError, match="has no use for the model"):
        placement.export(good, "json", model=Stack())


# -- the command --------------------------------------------------------------------------------------------------

MODEL = """
from torch import nn, zeros

class Half(nn.Sequential):
    pass

def make():
    model = nn.Sequential(*(Half(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    return model, (zeros(1, 4),)

def nothing():
    return 3
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    line(("0.0", 2, 0), ("0.1", 1, 1), ("1.0", 1, 1), ("1.1", 1, 1)).save(tmp_path / "placement.json")
    return tmp_path / "placement.json"


def test_the_command(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: object) -> str:
        assert run(["export", str(saved), *map(str, words)]) == 0
        return capsys.readouterr().out

    assert json.loads(call("--to", "device_map")) == {"0.0": 0, "0.1": 1, "1": 1}
    output, model = saved.with_name("map.json"), f"{saved.with_name('model.py')}:make"
    words = ("--to", "device_map", "--model", model, "--no-split", "Half", "-o", output)
    assert call(*words) == (
        "device map: 2 entries on 0 (176 bytes of 1 GB), 1 (176 bytes of 1 GB); "
        f"1 of 4 ops are not where they were placed; saved to {output}\n"
    )
    assert json.loads(output.read_text(encoding="utf-8")) == {"0": 0, "1": 1}
    assert json.loads(call(*words, "--json")) == {"0": 0, "1": 1}
    assert "4 ops on 2 devices" in call("--to", "json", "-o", output)


def test_bad_input_of_the_command(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{saved.with_name('model.py')}:make"
    for words, fragment in {
        f"{saved} --to onnx": "unknown target 'onnx'",
        f"{saved}": "Missing option '--to'",
        f"{saved}x --to json": "No such file",
        f"{saved.with_name('model.py')} --to json": "is not a saved result",
        f"{saved} --to device_map --no-split Half": "give the model too, with --model",
        f"{saved} --to device_map --no-split Quarter --model {model}": "unknown class of modules in Sequential",
        f"{saved} --to device_map --model {saved}": "is no model; give a built-in one or file.py:function",
        f"{saved} --to device_map --model {model.replace('make', 'nothing')}": "expected a model",
        f"{saved} --to json -o {saved}": "is also what the command reads",
    }.items():
        assert run(["export", *words.split()]) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert fragment in captured.err


# -- inputs of the model ------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Layers that all take a mask, as it is given or made in `forward`, and a loss over labels."""

    def __init__(self, made: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.made = nn.Embedding(50, 64), nn.Linear(64, 50), made
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        keep = mask.logical_not().unsqueeze(-1) if self.made else None
        for layer in self.layers:
            x = layer(x) * (mask.logical_not().unsqueeze(-1) if keep is None else keep)
        logits: Tensor = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Last(nn.Module):
    def forward(self, states: tuple[Tensor, Any]) -> Tensor:
        return states[0]


def masked(made: bool, labels: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return Masked(made), (tokens, torch.zeros(2, 8, dtype=torch.bool), *([tokens + 1] if labels else []))


def test_labels_meet_logits_on_the_first_gpu() -> None:
    """accelerate moves inputs of the model there, and nothing moves them on to what `forward` combines them with."""
    model, args = masked(made=False, labels=True)
    found = placed_model(model, args, lambda module: int(module == "head"))
    assert set(placement.export(found, "device_map", model=model).values()) == {0}
    model, args = masked(made=False, labels=False)
    found = placed_model(nn.Sequential(*model.layers), (torch.zeros(2, 64),), lambda module: int(module > "1"))
    assert set(placement.export(found, "device_map").values()) == {0, 1}
