"""Device maps: which module goes to which device, and that hooks can run it there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_map_cases import Stack, cluster_of, line, placed, placed_model, places, second_half
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import placement
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import OpGraph
from placement.exporters import module_ranges
from placement.exporters.module_ranges import Needs

GPUS = cluster_of("gpu", "gpu")


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


X = (torch.randn(3, 4),)


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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.first(x))
        return out


# -- device maps: what hooks cannot move --------------------------------------------------------------------------


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


# -- device maps: transformers ------------------------------------------------------------------------------------


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


def masked(made: bool, labels: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return Masked(made), (tokens, torch.zeros(2, 8, dtype=torch.bool), *([tokens + 1] if labels else []))


# -- inputs of the model ------------------------------------------------------------------------------------------


def test_labels_meet_logits_on_the_first_gpu() -> None:
    """accelerate moves inputs of the model there, and nothing moves them on to what `forward` combines them with."""
    model, args = masked(made=False, labels=True)
    found = placed_model(model, args, lambda module: int(module == "head"))
    assert set(placement.export(found, "device_map", model=model).values()) == {0}
    model, args = masked(made=False, labels=False)
    found = placed_model(nn.Sequential(*model.layers), (torch.zeros(2, 64),), lambda module: int(module > "1"))
    assert set(placement.export(found, "device_map").values()) == {0, 1}
