"""Styles of the torch runner under torchrun: what a module cut over all ranks makes, beside the module in one piece.

    torchrun --nproc-per-node 2 styles_worker.py FILE

Writes into the file, for each case, the largest difference of outputs and gradients relative to the largest entry.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

from placement.runtime.torch_runner.parallel import (
    AttentionParallel,
    SummedParallel,
    TransposedParallel,
    WholeParallel,
)

BATCH, WORDS, WIDTH = 3, 6, 16


class Transposed(nn.Module):
    """A linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Fused(nn.Module):
    """Three tensors of one transposed layer, whose product another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Transposed(WIDTH, 3 * WIDTH), Transposed(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.inner(x).split(WIDTH, dim=-1)
        result: Tensor = self.outer(first * second.sigmoid() + third)
        return result


class Experts(nn.Module):
    """Each word by one of two experts, with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.randn(2, 2 * 8, WIDTH))
        self.contract = nn.Parameter(torch.randn(2, WIDTH, 8))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("nti,neoi->neto", x, self.expand[chosen].unsqueeze(1)).squeeze(1).chunk(2, dim=-1)
        return torch.einsum("nto,nio->nti", gate.sigmoid() * up, self.contract[chosen]) * weights


class Routed(nn.Module):
    """A router, which is whole, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 1), Experts()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.experts(x, torch.tensor([0, 1, 1]), self.router(x))
        return result


def attention(batch_first: bool = True, **kwargs: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first, **kwargs)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module


def sequences(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, WORDS, WIDTH)))


CAUSAL = nn.Transformer.generate_square_subsequent_mask(WORDS)
PADDING = torch.arange(WORDS) > torch.tensor([[5], [2], [3]])
OF_HEADS = torch.arange(BATCH * 4 * WORDS * WORDS).sin().reshape(BATCH * 4, WORDS, WORDS)
TO_ROUTED = {"expand": _StridedShard(1, split_factor=2), "contract": Shard(2)}


def to_itself(module: nn.Module, **kwargs: Any) -> Callable[[Tensor], Any]:
    return lambda x: module(x, x, x, **kwargs)


# Of each case: the module, its styles by path, and how it is called on tensors.
Case = tuple[nn.Module, dict[str, ParallelStyle], Callable[[nn.Module], Callable[..., Any]], tuple[Tensor, ...]]


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    heads = {"": AttentionParallel()}
    one = (sequences(),)
    of_memory = (sequences(), sequences(BATCH, 4, 8), sequences(BATCH, 4, 12))
    blocks = {"inner": TransposedParallel(1, blocks=3), "outer": TransposedParallel(0)}
    as_dtensors = {
        "inner": TransposedParallel(1, blocks=3, use_local_output=False),
        "outer": TransposedParallel(0),
    }
    routed: dict[str, ParallelStyle] = {"experts": SummedParallel(TO_ROUTED)}
    return {
        "told": (attention(), heads, to_itself, one),
        "of_each_head": (attention(), heads, lambda m: to_itself(m, average_attn_weights=False), one),
        "causal": (
            attention(),
            heads,
            lambda m: to_itself(m, attn_mask=CAUSAL, is_causal=True, need_weights=False),
            one,
        ),
        "padded": (
            attention(bias=False),
            heads,
            lambda m: to_itself(m, key_padding_mask=PADDING, attn_mask=CAUSAL < 0, need_weights=False),
            one,
        ),
        "masked_by_heads": (attention(), heads, lambda m: to_itself(m, attn_mask=OF_HEADS), one),
        "words_first": (attention(batch_first=False), heads, to_itself, (sequences(WORDS, BATCH, WIDTH),)),
        "no_batch": (attention(), heads, to_itself, (sequences(WORDS, WIDTH),)),
        "of_memory": (attention(kdim=8, vdim=12), heads, lambda m: m, of_memory),
        "in_blocks": (Fused(), blocks, lambda m: m, one),
        "in_blocks_of_dtensors": (Fused(), as_dtensors, lambda m: m, one),
        "outputs_whole": (
            Transposed(WIDTH, 8),
            {"": TransposedParallel(1, output_layouts=Replicate())},
            lambda m: m,
            one,
        ),
        "experts": (Routed(), routed, lambda m: m, one),
    }


def along_sequence() -> dict[str, Case]:
    """Cases whose input and output are cut along the sequence, as DTensors."""
    torch.manual_seed(1)
    one = (sequences(),)
    cut = {"input_layouts": Shard(1), "output_layouts": Shard(1), "use_local_output": False}
    routed = {"": WholeParallel(output_layouts=Shard(1)), "experts": SummedParallel(TO_ROUTED)}
    return {
        "heads_along_sequence": (
            attention(),
            {"": AttentionParallel(**cut)},
            lambda m: to_itself(m, attn_mask=CAUSAL, is_causal=True, need_weights=False),
            one,
        ),
        "experts_along_sequence": (Routed(), routed, lambda m: m, one),
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found: list[Tensor], right: list[Tensor]) -> float:
    assert len(found) == len(right)
    return max(
        float((whole(one) - other).detach().abs().max() / other.detach().abs().max())
        for one, other in zip(found, right, strict=True)
    )


def compared(case: Case, mesh: DeviceMesh, is_cut: bool) -> dict[str, float]:
    module, styles, called, inputs = case
    inputs, given = ([x.detach().clone().requires_grad_() for x in inputs] for _ in range(2))
    right = [y for y in tree_leaves(called(module)(*inputs)) if y is not None]
    weights = [torch.randn_like(y) for y in right]
    torch.stack([(y * w).sum() for y, w in zip(right, weights, strict=True)]).sum().backward()
    other = copy.deepcopy(module)
    other.zero_grad()
    for path, style in styles.items():
        parallelize_module(other.get_submodule(path), mesh, style)
    read = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in given] if is_cut else given
    found = [y for y in tree_leaves(called(other)(*read)) if y is not None]
    torch.stack([(whole(y) * w).sum() for y, w in zip(found, weights, strict=True)]).sum().backward()
    gradients = [p.grad for p in other.parameters()] + [x.grad for x in read]
    return {
        "outputs": difference(found, right),
        "gradients": difference(gradients, [p.grad for p in module.parameters()] + [x.grad for x in inputs]),  # type: ignore[misc]
        "part": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in other.parameters())
        / sum(p.numel() for p in module.parameters()),
    }


def encoder_in_evaluation(mesh: DeviceMesh) -> dict[str, float]:
    """A layer in evaluation mode, which has kernels that read weights themselves."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval()
    x = torch.randn(BATCH, WORDS, WIDTH)
    with torch.no_grad():
        right = layer(x)
        parallelize_module(layer.self_attn, mesh, AttentionParallel())
        return {"outputs": difference([layer(x)], [right])}


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    seen = {name: compared(case, mesh, is_cut=False) for name, case in cases().items()}
    seen.update({name: compared(case, mesh, is_cut=True) for name, case in along_sequence().items()})
    seen["in_evaluation"] = encoder_in_evaluation(mesh)
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(seen))
    distributed.destroy_process_group()
