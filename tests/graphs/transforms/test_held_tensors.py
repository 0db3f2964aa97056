"""What stacks keep for the backward pass, beside what torch.compile's partitioner keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from graphs import OpGraph, Phase
from graphs.capture import capture
from graphs.transforms import on_stack

ROWS, HIDDEN, INNER = 128, 64, 192
LOSS = 4  # bytes


class Gated(nn.Module):
    """A norm and a gated feed-forward network."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = norm(HIDDEN)
        self.gate, self.expand = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.contract = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normed = self.norm(x)
        result: Tensor = x + self.contract(F.silu(self.gate(normed)) * self.expand(normed))
        return result


def held_bytes(graph: OpGraph) -> int:
    """Bytes of tensors of the forward pass, arguments and loss aside, that ops of the backward pass read."""
    producer, consumer, tensor = graph.edge_list
    crosses = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.BACKWARD)
    made = zip(tensor[crosses].tolist(), producer[crosses].tolist(), strict=True)
    chosen = {t for t, op in made if graph.kinds[op] != "input" and graph.tensor_bytes[t] > LOSS}
    return int(graph.tensor_memory_bytes[sorted(chosen)].sum())


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that torch.compile keeps for the backward pass, by its min-cut partitioner, parameters aside."""
    found: list[int] = []

    def forward(module: torch.fx.GraphModule, _: object) -> object:
        nodes = [*module.graph.nodes][-1].args[0][1:]
        kept = [n for n in nodes if n.op != "placeholder" and not n.name.startswith(("permute", "t_"))]
        found.append(sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in kept))
        return module.forward

    run = aot_module(
        model,
        fw_compiler=forward,
        bw_compiler=lambda module, _: module.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    run(x)
    return found[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_compiled_step_keeps_what_min_cut_keeps(norm: type[nn.Module]) -> None:
    model = Gated(norm).bfloat16()
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    graph = capture(model, (x,), train=True, optimizer="sgd")
    assert held_bytes(on_stack(graph, "compiled")) == saved_bytes(model, x)


class Classified(nn.Module):
    """GELU spelt out, of whose ops some are read by no backward op, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.last(0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))))
        return F.cross_entropy(x.float(), torch.zeros(ROWS, dtype=torch.long))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_keeps_the_logits_in_the_format_in_which_they_lie() -> None:
    model, x = Classified().bfloat16(), torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    graph = capture(model, (x,), train=True, optimizer="sgd")
    # Beside them a few numbers of each row, which are not counted.
    assert held_bytes(on_stack(graph, "compiled")) == pytest.approx(saved_bytes(model, x), rel=0.03)
    assert held_bytes(graph) > 2 * held_bytes(on_stack(graph, "compiled"))


@pytest.mark.parametrize("stack", ["compiled", "fused"])
def test_a_kernel_keeps_what_it_read_in_the_format_in_which_it_lies(stack: str) -> None:
    """Of the norm its input, its result and a number a row; of SwiGLU two products and the result. All of 2 bytes."""
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    graph = capture(Gated().bfloat16(), (x,), train=True, optimizer="sgd")
    assert held_bytes(on_stack(graph, stack)) == 2 * ROWS * (2 * HIDDEN + 3 * INNER) + 4 * ROWS
    # Eager, the silu is kept as well.
    assert held_bytes(graph) == 2 * ROWS * (2 * HIDDEN + 4 * INNER) + 4 * ROWS


def test_what_a_product_reads_is_kept_although_it_could_be_computed_again() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(F.relu(self.first(x)).square())
            return result

    graph = capture(Square(), (torch.zeros(ROWS, HIDDEN),), train=True, optimizer="sgd")
    assert held_bytes(on_stack(graph, "fused")) == held_bytes(graph)
    assert held_bytes(on_stack(graph, "compiled")) <= held_bytes(graph)
