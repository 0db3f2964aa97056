"""Models of exported scripts: each function gives a model, the positional and the keyword arguments of one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    """A layer as GPT-2 has them, with a linear layer each for query, key and value."""

    def __init__(self, width: int, heads: int, scaled: bool) -> None:
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(width // heads)) if scaled else 1.0
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm_1(x)
        query, key, value = (
            linear(normed).reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = (query * self.scale @ key.transpose(2, 3)) / (width // self.heads) ** 0.5 + mask
        x = x + self.project((scores.softmax(3) @ value).transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm_2(x))))


class Decoder(nn.Module):
    """Token numbers and the next ones, [batch, length] each, to the mean cross-entropy."""

    def __init__(self, layers: int = 4, width: int = 16, words: int = 32, *, tied: bool = False, scaled: bool = False):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width, 4, scaled) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = torch.full((length, length), -torch.inf, device=tokens.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class FusedBlock(Block):
    """The same, with one linear layer for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, scaled=False)
        del self.query, self.key, self.value
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(1e-9)  # of nothing

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.norm_1(x)).chunk(3, dim=2)
        )
        scores = (query @ key.transpose(2, 3)) / (width // self.heads) ** 0.5 + mask
        x = x + self.project((self.dropout(scores.softmax(3)) @ value).transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm_2(x))))


def _tokens(words: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randint(0, words, (8, 8)), torch.randint(0, words, (8, 8))


def decoder() -> Made:
    torch.manual_seed(0)
    return Decoder(), _tokens(), {}


def tied_decoder() -> Made:
    torch.manual_seed(0)
    return Decoder(layers=2, tied=True), _tokens(), {}


def uneven_decoder() -> Made:
    """A number of words that no number of devices divides."""
    torch.manual_seed(0)
    return Decoder(layers=2, words=33, tied=True), _tokens(33), {}


def fused_decoder() -> Made:
    torch.manual_seed(0)
    model = Decoder(layers=2, tied=True)
    model.layers = nn.ModuleList(FusedBlock(16, 4) for _ in range(2))
    return model, _tokens(), {}


def scaled_decoder() -> Made:
    """Queries are multiplied by a parameter, between layers that tensor parallelism cuts."""
    torch.manual_seed(0)
    return Decoder(layers=2, scaled=True), _tokens(), {}


def two_scores() -> Made:
    """A cross-entropy of a head, and one of what comes before it."""

    class Two(Decoder):
        def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
            loss: Tensor = super().forward(tokens, following)
            return loss + functional.cross_entropy(self.words(tokens).flatten(0, 1), following.flatten() % 16)

    torch.manual_seed(0)
    return Two(layers=1), _tokens(), {}


def penalized() -> Made:
    """A cross-entropy of a head, and a mean of what comes before it."""

    class Penalized(Decoder):
        def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
            loss: Tensor = super().forward(tokens, following) + self.words(tokens).square().mean()
            return loss

    torch.manual_seed(0)
    return Penalized(layers=1), _tokens(), {}


def one_hot_decoder() -> Made:
    """Layers that fill zeros in place beside their attention."""

    class Filling(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x + functional.one_hot(x.argmax(2), x.shape[2]).to(x.dtype), mask)

    torch.manual_seed(0)
    model = Decoder(layers=2)
    model.layers = nn.ModuleList(Filling(16, 4, scaled=False) for _ in range(2))
    return model, _tokens(), {}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    tokens, _ = _tokens()
    return LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}


def batch_normed() -> Made:
    """Layers with running statistics, which a step changes once for each part of the batch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.LogSoftmax(1)), (torch.randn(8, 8),), {}


def convnet() -> Made:
    """Residual convolutions with group norms, which are the same for each sample however the batch is cut."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x + self.norm(self.convolution(x)))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(), Residual(), nn.Flatten(), nn.Linear(8 * 8 * 8, 4), nn.LogSoftmax(1)
    )
    return model, (torch.randn(8, 3, 8, 8),), {}


def classified(samples: int = 8) -> Made:
    """Convolutions, and linear layers with most of the weights."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
            self.classifier = nn.Sequential(
                nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
            )

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = functional.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)
            return loss

    torch.manual_seed(0)
    return Classifier(), (torch.randn(samples, 3, 8, 8), torch.randint(0, 10, (samples,))), {}


def nine_classified() -> Made:
    return classified(9)


def named_as_wrappers() -> Made:
    """Modules with the names that torch's wrappers give theirs."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.stages = nn.Linear(8, 32), nn.ModuleDict({"model": nn.Linear(32, 8)})

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.stages["model"](self.module(x).relu())
            return made

    torch.manual_seed(0)
    return Named(), (torch.randn(8, 8),), {}


def hooked() -> Made:
    """Hooks on gradients, which a part of the batch has others of."""

    def clamped(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(max=1e-2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model[2].weight.register_hook(lambda gradient: gradient / 2)
    model[2].bias.register_post_accumulate_grad_hook(clamped)
    return model, (torch.randn(8, 8),), {}


def softened() -> Made:
    """A module without parameters, in which a stage may begin, beside one with some."""

    class Softened(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.mul(2).tanh() + h

    class Bodied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), Softened())

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.body(x)
            return made

    torch.manual_seed(0)
    return Bodied(), (torch.randn(8, 8),), {}


def scaled() -> Made:
    """Parameters beside modules, some of which stages begin between."""

    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.before, self.after = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
            self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.contract(self.expand(x * self.before).relu()) * self.after

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.temperature = Scaled(8), nn.Parameter(torch.rand(1))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x) * self.temperature
            return made

    torch.manual_seed(0)
    return Tempered(), (torch.randn(8, 8),), {}


class Labelled(nn.Module):
    """Token numbers to the mean cross-entropy of a head, or the sum of two; a label of -100 does not count."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(20, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 20) for _ in range(heads))

    def forward(self, tokens: Tensor, labels: Tensor, others: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        loss = self.loss(self.heads[0](x), labels)
        return loss if others is None else loss + self.loss(self.heads[1](x), others)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _labelled(heads: int = 1, labels: int = 1) -> Made:
    torch.manual_seed(0)
    tokens, *listed = (torch.randint(0, 20, (4, 8)) for _ in range(1 + labels))
    for number, one in enumerate(listed):
        one[number, 1:], one[number + 1, 3:] = -100, -100
    return Labelled(heads), (tokens, *listed), {}


def padded() -> Made:
    """Most labels of the first half of the batch do not count."""
    return _labelled()


def two_labels() -> Made:
    """Two losses, over labels of which different ones count, and a head without any."""
    return _labelled(heads=3, labels=2)


def two_means() -> Made:
    """The same with labels that all count."""
    model, args, kwargs = two_labels()
    return model, tuple(tensor.clamp(min=0) for tensor in args), kwargs


def binary() -> Made:
    """A cross-entropy of which every entry counts."""

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.binary_cross_entropy_with_logits(self.body(x), y)

    torch.manual_seed(0)
    return Binary(), (torch.randn(8, 8), torch.rand(8, 8)), {}


def contrastive() -> Made:
    """Each sample beside all others of the batch."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(self.body(x) @ self.body(y).T, torch.arange(len(x), device=x.device))

    torch.manual_seed(0)
    return Pairs(), (torch.randn(8, 8), torch.randn(8, 8)), {}


def summed() -> Made:
    """A loss that grows with the number of samples."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().sum()

    torch.manual_seed(0)
    return Sum(), (torch.randn(8, 8),), {}


def balanced(every: int = 2) -> Made:
    """Layers of which some return a second loss, that all layers' are added up to, and others None."""

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.is_balanced = bool(every) and number % every == 0
            self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            inner = self.inner(self.norm(x)).tanh()
            return x + inner, inner.square().mean() if self.is_balanced else None

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, range(4)))
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            balances = []
            for layer in self.layers:
                x, balance = layer(x)
                balances += [] if balance is None else [balance]
            loss: Tensor = self.head(x).square().mean()
            return loss + 0.1 * torch.stack(balances).mean() if balances else loss

    torch.manual_seed(0)
    return Balanced(), (torch.randn(8, 4, 8),), {}


def paired() -> Made:
    """Layers that return a tensor and None."""
    return balanced(every=0)


def routed() -> Made:
    """Layers of experts, each with its part of a tensor that the code takes apart, and a second loss of each layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            normed = self.norm(x)
            gates = self.gate(normed).softmax(2)
            first, second = (part.mean() for part in gates.topk(2).values.unbind(2))
            for expert, gate in zip(self.experts, gates.unbind(2), strict=True):
                x = x + expert(normed) * gate.unsqueeze(2)
            return x, first - second

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            balances = []
            for layer in self.layers:
                x, balance = layer(x)
                balances.append(balance)
            return x.square().mean() + torch.stack(balances).mean()

    torch.manual_seed(0)
    return Routed(), (torch.randn(8, 4, 8),), {}


def looping() -> Made:
    """A loop over parts of a tensor, as many as its shape says."""

    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            up = self.up(x)
            return torch.stack([part.square().mean() for part in (self.down(up) + up).unbind(1)]).mean()

    torch.manual_seed(0)
    return Looping(), (torch.randn(8, 8),), {}


def towers() -> Made:
    """Two networks that meet in the scores of all pairs of the batch's samples."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 8)
            self.user, self.item = (
                nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
                for _ in range(2)
            )

        def forward(self, users: Tensor, items: Tensor, labels: Tensor) -> Tensor:
            user, item = self.user(self.words(users).flatten(1)), self.item(self.words(items).flatten(1))
            scores = functional.normalize(user, dim=1) @ functional.normalize(item, dim=1).T
            return functional.cross_entropy(scores / 0.1, labels)

    torch.manual_seed(0)
    labels = torch.randint(0, 8, (8,))
    labels[:3] = -100
    return Towers(), (torch.randint(0, 20, (8, 4)), torch.randint(0, 20, (8, 4)), labels), {}


def fused_uneven() -> Made:
    """Three heads, which two devices do not divide, in one linear layer for query, key and value."""
    torch.manual_seed(0)
    model = Decoder(layers=2, width=24)
    model.layers = nn.ModuleList(FusedBlock(24, 3) for _ in range(2))
    return model, _tokens(), {}


def grouped_convnet() -> Made:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 64, 3, groups=4), nn.ReLU()), (torch.randn(8, 4, 8, 8),), {}


def wide_convnet() -> Made:
    """Convolutions that have most of the weights, with norms between them that are the same for each sample."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False)
    )
    return nn.Sequential(*model, nn.ReLU(), nn.Conv2d(16, 4, 4, stride=4), nn.Flatten()), (torch.randn(8, 3, 8, 8),), {}


def prefixed() -> Made:
    """A token that the model puts in front of others, whose shape it turns over before."""

    class Prefixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first = nn.Linear(8, 6), nn.Parameter(torch.ones(1, 1, 8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.first.expand(x.shape[0], -1, -1), self.inner(x).transpose(1, 2)], 1)
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    torch.manual_seed(0)
    return Prefixed(), (torch.randn(8, 8, 8),), {}
