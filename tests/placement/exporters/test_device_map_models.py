"""Device maps within memory, and as Transformers reads them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_map_cases import Stack, cluster_of, line, placed, placed_model, places, second_half
from torch import Tensor, nn

import placement
from env.cluster import Cluster
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from placement.results.result import Result

GPUS = cluster_of("gpu", "gpu")
X = (torch.randn(3, 4),)


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


# -- within memory ------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def bert() -> tuple[Any, tuple[Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    return transformers.BertForMaskedLM(config).eval(), (torch.randint(0, 50, (2, 8)),)


def halves(graph: OpGraph) -> list[int]:
    return (graph.topological_position >= graph.n_ops // 2).astype(int).tolist()


# -- device maps: transformers ------------------------------------------------------------------------------------


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
