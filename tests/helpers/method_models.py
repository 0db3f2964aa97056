"""A model with methods of its own, and what a rank does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphs.capture import capture_program
from graphs.errors import MismatchError
from placement.runtime.ranks.group import RankGroup

TOKENS = torch.arange(12).reshape(3, 4)


class Base(nn.Module):
    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(tokens).argmax(-1)
        return found


class Words(Base):
    """Tokens to logits."""

    name = "words"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encode(tokens))
        return found

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(self.embed(tokens))
        return found

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().predict(tokens)

    def predict_by_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.forward(tokens).argmax(-1)

    def one_by_one(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            yield self(tokens)

    def rename(self, name: str) -> None:
        self.name = name

    def class_name(self) -> str:
        return type(self).__name__

    def fails(self) -> float:
        return 1 / 0

    def with_callback(self, callback: Callable[[], None]) -> None:
        callback()


def on_a_rank(description: None) -> dict[str, Any]:
    """All ranks call a method that calls the model, and one that calls a module; then tokens of another length."""
    from rank_work import chosen, share

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Words().eval()
    twin = copy.deepcopy(model)
    program = capture_program(model, (TOKENS,))
    placed: Any = share(model, chosen(program, [op % 2 for op in range(program.graph.n_ops)]), RankGroup.of())
    calls: list[str] = []
    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(lambda *_, path=path: calls.append(path))
    with torch.no_grad():
        found: dict[str, Any] = {
            "predict": torch.equal(placed.predict(TOKENS), twin.predict(TOKENS)),
            "calls": [*calls],
        }
        found["longer"] = torch.equal(placed(TOKENS.reshape(2, 6)), twin(TOKENS.reshape(2, 6)))
    try:
        placed.encode(TOKENS)
        found["refused"] = False
    except MismatchError as error:
        found["refused"] = "calls module 'embed' by itself" in str(error)
    return found
