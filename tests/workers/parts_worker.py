"""Parts of sequences and of experts under torchrun: losses and gradients beside those of the model in one piece.

    torchrun --nproc-per-node 2 parts_worker.py FILE

Writes into the file, for each case, the difference of losses and the largest one of gradients, relative to the largest
entry.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement.runtime.torch_runner.parallel import parallelize
from placement.runtime.torch_runner.setup import Setup
from placement.runtime.torch_runner.step import run_step

BATCH, WORDS, WIDTH, HEADS, VOCABULARY = 2, 8, 16, 4, 11


class Attention(nn.Module):
    """Causal attention of two heads to each key."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key, value = (y.unflatten(2, (HEADS // 2, -1)).transpose(1, 2) for y in self.key_value(x).chunk(2, dim=2))
        made = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return made.transpose(1, 2).flatten(2)


class Asked(nn.Module):
    """Experts that get tokens, the numbers of those that these ask, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.expand, self.contract = nn.Parameter(torch.randn(4, WIDTH, 8)), nn.Parameter(torch.randn(4, 8, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            token, place = torch.where(top_k_index == number)
            made = torch.tanh(hidden_states[token] @ self.expand[number]) @ self.contract[number]
            total = total.index_add(0, token, made * top_k_weights[token, place, None])
        return total


class Mixture(nn.Module):
    """A router and experts, all of which get each token, or those that it asks for."""

    def __init__(self, is_asked: bool) -> None:
        super().__init__()
        self.router, self.is_asked = nn.Linear(WIDTH, 4), is_asked
        if is_asked:
            self.experts = Asked()
        else:
            self.expand, self.contract = nn.Parameter(torch.randn(4, WIDTH, 8)), nn.Parameter(torch.randn(4, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(2)
        if self.is_asked:
            best, asked = weights.flatten(0, 1).topk(2, dim=1)
            result: Tensor = self.experts(x.flatten(0, 1), asked, best).view_as(x)
            return result
        rows = x.flatten(0, 1).expand(4, -1, -1)
        made = torch.bmm(nn.functional.silu(torch.bmm(rows, self.expand)), self.contract)
        return torch.einsum("erd,re->rd", made, weights.flatten(0, 1)).view_as(x)


class Model(nn.Module):
    """Words and positions, attention or a mixture, and scores of the next word."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.table = nn.Parameter(torch.randn(2 * WORDS, WIDTH))
        self.inner, self.scores = inner, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1])) + self.table[: words.shape[1]]
        return nn.functional.cross_entropy(self.scores(x + self.inner(x)).flatten(0, 1), labels.flatten())


def of_context(variant: str, **kwargs: Any) -> Setup:
    return Setup(
        mesh={"dp": 2},
        batch=BATCH,
        replicas=2,
        replica_axes=("dp",),
        cuts_batch=True,
        labels="each",
        context=2,
        context_variant=variant,
        context_modules=("", "inner"),
        sequence_inputs={"words": 1, "labels": 1},
        tables=(("", "table", 0),),
        **kwargs,
    )


def of_experts(modules: dict[str, bool], **kwargs: Any) -> Setup:
    return Setup(
        mesh={"dp": 2},
        batch=BATCH,
        replicas=2,
        replica_axes=("dp",),
        cuts_batch=True,
        labels="each",
        experts=2,
        expert_modules=modules,
        cuts_replicas=True,
        **kwargs,
    )


IS_DDP: dict[str, Any] = {"is_ddp": True}
IS_SHARDED: dict[str, Any] = {"is_sharded": True, "zero": 3, "sharding_axes": ("dp",), "layers": ("inner",)}
CASES = {
    "gather": (Attention, of_context("gather", **IS_DDP)),
    "ulysses": (Attention, of_context("ulysses", **IS_DDP)),
    "ring": (Attention, of_context("ring", **IS_DDP)),
    "ring_sharded": (Attention, of_context("ring", **IS_SHARDED)),
    "gather_recomputed": (Attention, of_context("gather", **IS_DDP, computed_again=("inner",))),
    "asked": (lambda: Mixture(True), of_experts({"inner.experts": True}, **IS_DDP)),
    "asked_sharded": (lambda: Mixture(True), of_experts({"inner.experts": True}, **IS_SHARDED)),
    "rows": (lambda: Mixture(False), of_experts({"inner": False}, **IS_DDP)),
    "rows_sharded": (lambda: Mixture(False), of_experts({"inner": False}, **IS_SHARDED)),
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compared(name: str) -> dict[str, float]:
    torch.manual_seed(0)
    make, setup = CASES[name]
    model = Model(make())
    words = torch.randint(VOCABULARY, (BATCH, WORDS))
    labels = torch.randint(VOCABULARY, (BATCH, WORDS))
    labels[0, :3] = -100  # parts have unlike numbers of labels that count
    inputs = {"words": words, "labels": labels}
    right = copy.deepcopy(model)
    loss = right(**inputs)
    loss.backward()
    mesh = init_device_mesh("cpu", tuple(setup.mesh.values()), mesh_dim_names=tuple(setup.mesh))
    found = run_step(parallelize(model, mesh, setup), mesh, inputs, setup)
    gradients: list[Any] = [
        (whole(p.grad), q.grad) for p, q in zip(model.parameters(), right.parameters(), strict=True)
    ]  # type: ignore[arg-type]
    largest = [float(q.abs().max()) for _, q in gradients]
    least = 1e-3 * max(largest)  # one that is nothing but rounding is measured by the others
    off = [float((p - q).abs().max()) / max(size, least) for (p, q), size in zip(gradients, largest, strict=True)]
    return {
        "loss": abs(float(found) - float(loss.detach())),
        "gradients": max(off),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    seen = {name: compared(name) for name in CASES}
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(seen))
    distributed.destroy_process_group()
