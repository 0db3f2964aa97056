"""Split rows of captured graphs: views traced to memory, words, states, what is read in full, and old files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from baselines.strategies.applied import applied
from env.cluster import Cluster
from graphs.capture import capture
from graphs.capture.rows.assembly import _letters, dtensor_letters, dtensor_strategies
from graphs.capture.rows.naming import Elsewhere, digits
from graphs.capture.trace import Layout, tensor_info
from graphs.errors import MismatchError
from graphs.files import load_json_graph, save_graph
from graphs.opgraph import OpGraph
from graphs.records import Partial, Replicate, Shard
from graphs.transforms.coverage import TOGETHER, UPDATES, coverage, unshared
from graphs.transforms.strategy import Strategy
from graphs.zoo import build


def rows(graph: OpGraph, name: str) -> list[str]:
    """The rows of an op without what is read in full."""
    index = graph.op_names.index(name)
    return [str(row).partition(" whole")[0] for row in graph.split_rows[index]]


class Attention(nn.Module):
    """Query, key and value in one product, as GPT-2 has them; products of heads one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joint(x).split(8, dim=2)
        q, k, v = (part.view(3, 5, 2, 4).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(2, 3)).softmax(-1)
        result: torch.Tensor = self.out((scores @ v).transpose(1, 2).reshape(3, 5, 8))
        return result


@pytest.fixture(scope="module")
def attention() -> OpGraph:
    return capture(Attention(), (torch.zeros(3, 5, 8),), train=True)


def test_heads_are_found_in_blocks_of_one_product(attention: OpGraph) -> None:
    assert rows(attention, "joint/addmm") == [
        "batch: S(0,3),R,R->S(0,3)",
        "sequence: S(1,5),R,R->S(0,5,0,3)",
        "features: S(2,8),S(1,8),P->P",
        "heads: R,S(0,2,0,3),S(0,2,0,3)->S(1,2,0,3)",
    ]
    assert rows(attention, "out/addmm")[2] == "heads: S(2,2),S(1,2),P->P"


class CausalAttention(nn.Module):
    """In one call; query, key and value of one product or of three."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(8, 24 if is_fused else 8) for _ in range(1 if is_fused else 3))

    def forward(self, x: torch.Tensor, keys: int = 5, dropout: float = 0.0) -> torch.Tensor:
        parts = self.inputs[0](x).split(8, 2) if len(self.inputs) == 1 else [one(x) for one in self.inputs]
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in parts)
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k[:, :, :keys], v[:, :, :keys], dropout_p=dropout, is_causal=True)


@pytest.mark.parametrize("is_fused", [False, True])
def test_causal_attention_is_cut_by_its_queries(is_fused: bool) -> None:
    """Forward and backward; a tensor that has keys too is read in full."""
    graph = capture(CausalAttention(is_fused), (torch.zeros(3, 5, 8),), train=True)
    of_sequence = {
        graph.kinds[op].removeprefix("aten._scaled_dot_product_"): [
            str(row).partition(" whole")[0] for row in of_op if row.axis == "sequence"
        ]
        for op, of_op in enumerate(graph.split_rows)
        if "attention" in graph.kinds[op]
    }
    given = "R" if is_fused else "S(0,5,0,3),R,R"
    assert of_sequence["flash_attention_for_cpu"] == [f"sequence: {given}->S(2,5),S(2,5)"]
    (backward,) = of_sequence["flash_attention_for_cpu_backward"]
    assert backward.startswith(f"sequence: {given},S(2,5),S(2,5)")
    assert backward.endswith("->S(2,5),P,P")


def test_causal_attention_with_fewer_keys_than_queries_stays_whole() -> None:
    graph = capture(CausalAttention(False), (torch.zeros(3, 5, 8), 4))
    name = next(name for name in graph.op_names if "attention" in name)
    assert [row.partition(":")[0] for row in rows(graph, name)] == ["batch", "heads"]


def test_gradients_are_sums_over_samples_and_lie_as_their_parameters(attention: OpGraph) -> None:
    gradient = next(i for i, name in enumerate(attention.op_names) if name.startswith("joint/mm"))
    assert "batch: S(0,3),S(0,3),R->P" in rows(attention, attention.op_names[gradient])
    assert "heads: R,S(2,2,0,3),S(0,2,0,3)->S(0,2,0,3)" in rows(attention, attention.op_names[gradient])
    assert "heads: S(0,2,0,3),S(0,2,0,3)->" in rows(attention, "joint/weight.adam")


def test_states_name_their_users_and_their_bytes(attention: OpGraph) -> None:
    weight = next(state for state in attention.states if state.name == "joint.weight")
    assert (weight.parameter_bytes, weight.gradient_bytes, weight.optimizer_bytes) == (768, 768, 1536)
    assert weight.users[0] == "joint/addmm"
    assert weight.users[-1] == "joint/weight.adam"
    kept = sum(s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes for s in attention.states)
    assert kept == attention.kept_bytes.sum()


def test_what_every_part_reads_in_full(attention: OpGraph) -> None:
    product = attention.split_rows[attention.op_names.index("joint/addmm")]
    whole = {row.axis: row.whole_bytes for row in product}
    weights, bias, x, out = 4 * 24 * 8, 4 * 24, 4 * 15 * 8, 4 * 15 * 24
    assert whole == {
        "batch": weights + bias, "sequence": weights + bias, "features": out + bias, "heads": x,
    }  # fmt: skip


def test_a_file_keeps_rows_and_states(attention: OpGraph, tmp_path: Path) -> None:
    save_graph(attention, tmp_path / "g.json")
    assert load_json_graph(tmp_path / "g.json") == attention
    assert any(attention.split_rows)


class Odd(nn.Module):
    """One tensor read in two ways, and a slice that is no block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).sum() + (x[:, 1:4] * 2).sum()


def test_ops_that_take_samples_together() -> None:
    graph = capture(Odd(), (torch.zeros(4, 6),))
    assert rows(graph, "matmul") == ["features: S(1,6)->P"]  # both factors are one tensor: its rows meet one another
    assert rows(graph, "mul") == ["batch: S(0,4)->S(0,4)"]
    found = {one.kind: one for one in coverage(graph).unsplit}
    assert found["aten.matmul"].reason == TOGETHER


def test_updates_have_no_samples_and_graphs_without_rows_say_so(attention: OpGraph) -> None:
    assert {one.kind: one.reason for one in coverage(attention).unsplit}["optimizer.adam"] == UPDATES
    module = capture(Attention(), (torch.zeros(3, 5, 8),), granularity="module")
    with pytest.raises(MismatchError, match="no split rows"):
        coverage(module)


def test_sums_are_handed_on_to_one_exchange() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 6)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.table(words), self.table.weight)

    graph = capture(Tied(), (torch.zeros(4, 3, dtype=torch.long),), train=True)
    both = [i for i, kind in enumerate(graph.kinds) if kind == "aten.add"]
    assert [row for i in both for row in graph.split_rows[i] if row.axis == "batch" and Partial() in row.outputs]


@given(
    st.lists(st.integers(2, 4), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.data(),
)
def test_digits_find_the_entries_of_a_view(sizes: list[int], order: list[int], data: Any) -> None:
    """Cutting the memory where the digits say gives the entries that cutting the view gives."""
    memory = torch.arange(torch.Size(sizes).numel()).view(sizes)
    view = memory.permute([d for d in order if d < len(sizes)])
    if data.draw(st.booleans()) and view.is_contiguous():
        view = view.reshape(-1)
    dim = data.draw(st.integers(0, view.ndim - 1))
    found = digits(tensor_info(view), (dim,), tensor_info(memory))
    assert torch.Size([digit.length for digit in found]).numel() == view.shape[dim]
    if len(found) == 1:
        ((at, unit, length),) = found
        half = length // 2
        block = memory.narrow(at, 0, half * unit)
        assert sorted(block.flatten().tolist()) == sorted(view.narrow(dim, 0, half).flatten().tolist())


def test_slices_that_are_no_blocks_lie_elsewhere() -> None:
    memory = torch.zeros(4, 6)
    with pytest.raises(Elsewhere):
        digits(tensor_info(memory[:, 1:4]), (1,), tensor_info(memory))
    assert digits(tensor_info(memory[:, 3:]), (1,), tensor_info(memory)) == ((1, 1, 3),)


# -- DTensor's rules ---------------------------------------------------------------------------------------------------

_F32 = torch.float32


def _layout(*shape: int, dtype: torch.dtype = _F32) -> Layout:
    return Layout(shape, torch.empty(shape).stride(), dtype)


CALLS = {
    "mm": (torch.ops.aten.mm.default, (_layout(4, 6), _layout(6, 8)), (_layout(4, 8),)),
    "bmm": (torch.ops.aten.bmm.default, (_layout(3, 4, 6), _layout(3, 6, 8)), (_layout(3, 4, 8),)),
    "norm": (
        torch.ops.aten.native_layer_norm.default,
        (_layout(4, 5, 6), (6,), _layout(6), _layout(6), 1e-5),
        (_layout(4, 5, 6), _layout(4, 5, 1), _layout(4, 5, 1)),
    ),
    "relu": (torch.ops.aten.relu.default, (_layout(4, 5),), (_layout(4, 5),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtensor_says_the_same_as_our_rules(name: str) -> None:
    """Fails, too, when torch moves its rules: they are private to it, and `graphs.capture.rows.assembly` reads them."""
    target, args, outputs = CALLS[name]
    assert len(dtensor_strategies()) > 500
    theirs = {(frozenset(one.cuts), one.partial) for one in dtensor_letters(target, args, (), len(outputs))}
    ours = {(frozenset(one.cuts), one.partial) for one in _letters(target, args, (), outputs)[1] if one.cuts}
    assert theirs >= ours > set()


def test_a_kind_that_only_dtensor_knows_is_split() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_triangular(x, x, upper=True)

    graph = capture(Own(), (torch.zeros(4, 3, 3),))
    assert rows(graph, "linalg_solve_triangular") == ["batch: S(0,4)->S(0,4)"]


def test_without_dtensor_there_are_our_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphs.capture.rows.assembly.dtensor_strategies", dict)
    assert dtensor_letters(*CALLS["mm"][:2], (), 1) == []


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["resnet50", "unet", "nmt4", "gpt2", "llama3_8b", "mixtral_8x7b", "two_tower"])
def test_the_zoo_can_be_split_by_batch_and_by_one_more_axis(name: str, train: bool) -> None:
    zoo = build(name, small=True)
    shares = coverage(capture(zoo.model, zoo.train_args if train else zoo.args, train=train)).shares
    assert shares["batch"] > 0.99
    assert max(share for axis, share in shares.items() if axis != "batch") > 0.9


TOKENS = torch.zeros(4, 8, dtype=torch.long)


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    small |= {"intermediate_size": 64, "num_key_value_heads": 2}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), {"input_ids": TOKENS}
    config = transformers.MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), {"input_ids": TOKENS}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_models_of_transformers_can_be_split(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, kwargs = transformers_model(name)
        graph = capture(model, (), kwargs, train=True, loss=lambda out: out.logits.mean())
    shares = coverage(graph).shares
    assert shares["batch"] > 0.99
    assert shares["tensor"] > 0.9
    products = [i for i, kind in enumerate(graph.kinds) if "grouped_mm" in kind]
    assert (len(products) > 0) == (name == "mixtral")
    for i in products:  # each part has its own tokens, and its own numbers of tokens for each expert
        row = next(row for row in graph.split_rows[i] if row.axis == "batch")
        assert {type(part) for part in row.inputs} >= {Shard, Partial, Replicate}
    # A token's places in the list of its experts stay together: by them the token is known.
    sorts = [i for i, kind in enumerate(graph.kinds) if kind == "aten.sort"]
    assert (len(sorts) > 0) == (name == "mixtral")
    for i in sorts:
        assert {row.axis for row in graph.split_rows[i]} == {"batch", "sequence"}


def test_a_loss_over_probabilities_takes_classes_together() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(x, probabilities)

    graph = capture(Loss(), (torch.zeros(4, 3), torch.full((4, 3), 1 / 3)))
    assert rows(graph, "cross_entropy_loss") == ["batch: S(0,4),S(0,4)->P"]


def test_an_input_has_one_stretch_for_each_word_of_a_dimension() -> None:
    """The second convolution leaps by two: the positions of the input fall apart, and only long stretches are used."""
    layers = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, stride=2, padding=1))
    graph = capture(layers, (torch.zeros(2, 3, 20),))
    assert [row for row in rows(graph, "input") if row.startswith("sequence")] == ["sequence: ->S(2,10)"]
    assert "sequence: S(2,10,1),R,R->S(2,10)" in rows(graph, "1/conv1d")


class Ranked(nn.Module):
    """Sorts its samples between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x).sort(0)[0])
        return result


def test_a_sentence_says_what_every_replica_repeats_and_why() -> None:
    # Of five products of 8 x 6 x 6 the first and the gradient of its weight, which adds up over samples, can be cut.
    graph = capture(Ranked(), (torch.zeros(8, 6),), train=True)
    said = unshared(graph)
    assert said.startswith("60% of the FLOPs and ")
    assert said.endswith("of the bytes moved repeat on every replica: aten.sort takes the samples together.")
    assert applied(graph, Cluster.preset("4xV100-pcie"), Strategy.parse("dp2")).note.startswith(said)
    assert unshared(capture(nn.Linear(6, 6), (torch.zeros(8, 6),), train=True)) == ""
