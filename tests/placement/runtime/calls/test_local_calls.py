"""Every captured call on parts of its tensors: what the parts make, put together, is what the whole call makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from parallel.local_calls import differing, node_of, run, stretches, viewed
from parallel.recorded_calls import Layers, SampleBySample, recorded, squares
from parallel.row_numbers import RecordedCall, tensor
from torch import fx, nn
from zoo_models import LIKE_OTHERS

from graphs.capture.api import capture_program
from graphs.capture.costs import signature
from graphs.capture.trace import Layout, TensorInfo, flat, value_of
from graphs.errors import StrategyError
from graphs.rows import Shard
from graphs.zoo import MODELS, build
from placement.runtime.calls.local_calls import LocalCall, local_call
from placement.runtime.parts.layouts import take, whole
from placement.runtime.program.functional import functional

# Whose numbers are drawn.
_DRAWN = ("bernoulli_", "dropout", "native_dropout", "rand", "randn", "scaled_dot_product_attention")
# Of which a part has one stretch, not one of each block.
_STRETCHES = ("vocabulary", "height", "width", "sequence")
# NASNet has the kinds of ops of ResNet and of `Layers`, in many more shapes.
_NAMES = sorted(set(MODELS) - LIKE_OTHERS - {"nasnet_large"})
# A training step has the calls of inference, but for those of batch norms.
_MODELS = [(name, True) for name in _NAMES] + [
    pytest.param(name, False, marks=() if name == "resnet50" else pytest.mark.slow) for name in _NAMES
]

_checked: Counter[Any] = Counter()  # how many calls of each operator, over all models
_MOST = 5


def check(calls: list[RecordedCall]) -> set[str]:
    """Names of the operators that were checked, for this model or, `_MOST` times, for those before."""
    checked, problems = set(), []
    for call in calls:
        name = call.target._schema.name.partition("::")[2]
        if name in _DRAWN:
            continue
        checked.add(name)
        _checked[call.target] += 1
        if _checked[call.target] > _MOST:
            continue
        layouts = [leaf for leaf in flat((call.args, call.kwargs)) if type(leaf) is Layout]
        generator = torch.Generator().manual_seed(0)
        node = node_of(call)
        tensors = [tensor(layout, generator) for layout in layouts]
        consistent(call, tensors)
        for letter in call.letters:
            if not letter.cuts or any(len(cut.dims) > 1 for cut in letter.cuts):
                continue
            is_of_classes = "nll_loss" in name and letter.cuts[0].dims == (1,)
            in_blocks = [] if letter.word in _STRETCHES or is_of_classes else [(2, 2)]
            for n_parts, n_blocks in ((2, 1), (3, 1), *in_blocks):
                if letter.size % n_blocks or letter.size // n_blocks < n_parts:
                    continue
                try:
                    problem = differing(node, tensors, letter, n_parts, n_blocks)
                except Exception as error:
                    problem = f"{call.target} {letter}: {type(error).__name__} {error}"
                problems += [problem] if problem is not None else []
    assert problems == []
    return checked


def consistent(call: RecordedCall, tensors: list[torch.Tensor]) -> None:
    """Give arguments that others determine the values that they have in a model."""
    name = call.target._schema.name.partition("::")[2]
    if name.startswith("embedding"):
        rows = call.args[2] if "backward" in name else call.args[0].shape[0]
        tensors[1] = torch.randint(0, rows, tensors[1].shape, generator=torch.Generator().manual_seed(0))
    if name.startswith("nll_loss") and "backward" in name:
        tensors[-1] = torch.tensor(float(tensors[2].numel()), dtype=torch.float64)
    if name == "linalg_lu_solve":
        tensors[1].fill_(1)
    if name == "native_batch_norm_backward":
        variance, mean = torch.var_mean(tensors[1], [d for d in range(tensors[1].ndim) if d != 1], correction=0)
        tensors[-2:] = [mean, (variance + call.args[8]).rsqrt()]


@pytest.mark.parametrize(("name", "train"), _MODELS)
def test_calls_of_the_zoo(monkeypatch: pytest.MonkeyPatch, name: str, train: bool) -> None:
    zoo = build(name, small=True)
    assert check(recorded(monkeypatch, zoo.model, zoo.train_args if train else zoo.args, train))


@pytest.mark.parametrize("train", [False, True])
def test_calls_that_the_zoo_lacks(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    assert len(check(recorded(monkeypatch, Layers(), (torch.zeros(3, 4, 16, 16),), train))) > 10


def test_calls_that_work_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check(recorded(monkeypatch, SampleBySample(), (torch.zeros(4, 4, 8, 8),), True, squares))
    assert {"pixel_shuffle", "elu_backward", "_cdist_backward", "glu", "_trilinear", "col2im"} < checked


# -- views -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "train"), _MODELS)
def test_views_of_the_zoo(name: str, train: bool) -> None:
    zoo = build(name, small=True)
    count = check_views(zoo.model, zoo.train_args if train else zoo.args, train)
    assert count > 0 or name == "resnet50"  # which has none for inference


def check_views(model: nn.Module, args: Any, train: bool) -> int:
    """Every view of a model's step, with its root cut along every stretch of every dimension; the number of checks."""
    seen: set[str] = set()
    count = 0
    for node in functional(capture_program(model, args, None, train)).graph.nodes:
        base = _root(node)
        if base is None or (key := str((node.target, _layouts(node, base)))) in seen:
            continue
        seen.add(key)
        count += _check_view(node, base)
    return count


def _root(node: fx.Node) -> fx.Node | None:
    """The node that holds the memory that a view shares with its first argument; None where it is no view."""
    if node.op != "call_function" or not node.args or signature(node.target).writes:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or type(value_of(source)) is not TensorInfo:
        return None
    results = [one for one in flat(value_of(node)) if type(one) is TensorInfo]
    if not results or any(one.storage != value_of(source).storage for one in results):
        return None
    return _root(source) or source


def _layouts(node: fx.Node, base: fx.Node) -> list[Any]:
    infos = [value_of(node), value_of(node.args[0]), value_of(base)]
    return [(one.layout, one.offset) for info in infos for one in flat(info)]


def _check_view(node: fx.Node, base: fx.Node) -> int:
    root, source = value_of(base), value_of(node.args[0])
    made = [one for one in flat(value_of(node)) if type(one) is TensorInfo]
    if not made or len(node.all_input_nodes) > 1:
        return 0
    size = 1 + sum((n - 1) * step for n, step in zip(root.layout.shape, root.layout.stride, strict=True))
    memory = torch.arange(size).as_strided(root.layout.shape, root.layout.stride)
    count = 0
    for dim, length in enumerate(root.layout.shape):
        for extent, blocks in list(stretches(length))[:6]:
            part = whole(root.layout.shape).cut_by(Shard(dim, extent, blocks=blocks), 2, 1)
            try:
                here, outputs = part.viewed(source, root), [part.viewed(one, root) for one in made]
            except StrategyError:
                continue
            try:
                local: LocalCall = local_call(node, {node.args[0]: here}, outputs)  # type: ignore[dict-item]
            except StrategyError:
                # A slice of which some parts have nothing.
                assert any(out.share != part.share for out in outputs), f"{node.format_node()} {part}"
                continue
            results = run(local, {node.args[0]: take(viewed(memory, source, root), here).contiguous()})  # type: ignore[dict-item]
            for result, out, one in zip(results, outputs, made, strict=True):
                assert torch.equal(result, take(viewed(memory, one, root), out)), f"{node.format_node()} {part}"
            count += 1
    return count
