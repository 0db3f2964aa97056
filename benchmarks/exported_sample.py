"""Small models of many kinds, whose strategies `exported_scripts.py` exports: each function gives one for `capture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Net(nn.Module):
    """Modules by name, and a forward pass that gets them first."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.run(self, x, y)


def _made(run: Callable[..., Any], args: tuple[Tensor, ...], **modules: nn.Module) -> Made:
    return Net(run, **modules), args, {}


def _stack(width: int = 16, layers: int = 4, inner: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(width, width), inner())])


def _labels(*shape: int, classes: int, uneven: bool = False) -> Tensor:
    labels = torch.randint(0, classes, shape)
    if uneven:  # most of the first samples do not count
        labels[0, 1:], labels[1, 2:] = -100, -100
    return labels


def unused_heads() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: m.a(m.body(x)), (torch.randn(8, 16),), body=_stack(), a=nn.Linear(16, 3), b=nn.Linear(16, 4)
    )


def unused_table() -> Made:
    torch.manual_seed(0)
    words = nn.Embedding(20, 16)

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return functional.cross_entropy(m.head(m.body(m.words(x)).mean(1)), y)

    args = torch.randint(0, 20, (8, 6)), _labels(8, classes=5)
    return _made(run, args, words=words, other=nn.Embedding(7, 16), body=_stack(), head=nn.Linear(16, 5))


def _language(smoothing: float = 0.0, weight: Tensor | None = None, tied: bool = False, uneven: bool = True) -> Made:
    torch.manual_seed(0)
    words, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    if tied:
        head.weight = words.weight

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = m.head(m.body(m.words(x))).flatten(0, 1)
        return functional.cross_entropy(logits, y.flatten(), weight, label_smoothing=smoothing)

    return _made(
        run,
        (torch.randint(0, 20, (8, 6)), _labels(8, 6, classes=20, uneven=uneven)),
        words=words,
        body=_stack(),
        head=head,
    )


def padded_labels() -> Made:
    return _language()


def label_smoothing() -> Made:
    return _language(smoothing=0.1)


def class_weights() -> Made:
    return _language(weight=torch.linspace(0.1, 2.0, 20))


def tied_weights() -> Made:
    return _language(tied=True)


def two_losses() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.body(m.words(x))
        first, second = (
            functional.cross_entropy(head(h).flatten(0, 1), labels.flatten())
            for head, labels in ((m.a, y), (m.b, y.roll(1, 1)))
        )
        return first + 0.3 * second

    parts = {"words": nn.Embedding(20, 16), "body": _stack(), "a": nn.Linear(16, 20), "b": nn.Linear(16, 20)}
    return _made(run, (torch.randint(0, 20, (8, 6)), _labels(8, 6, classes=20, uneven=True)), **parts)


def z_loss() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = m.head(m.body(x))
        return functional.cross_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()

    return _made(run, (torch.randn(8, 16), _labels(8, classes=5)), body=_stack(), head=nn.Linear(16, 5))


def next_token() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = m.head(m.body(m.words(x)))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten(), ignore_index=0)

    tokens = torch.randint(0, 3, (8, 7))
    return _made(run, (tokens, tokens.clone()), words=nn.Embedding(20, 16), body=_stack(), head=nn.Linear(16, 20))


def masked_mean() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return (m.body(x).square() * y).sum() / y.sum()

    return _made(run, (torch.randn(8, 16), (torch.rand(8, 16) > 0.5).float()), body=_stack())


def contrastive() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        one, other = (functional.normalize(m.body(v), dim=-1) for v in (x, y))
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(x), device=x.device))

    return _made(run, (torch.randn(8, 16), torch.randn(8, 16)), body=_stack())


def barlow_twins() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        one, other = ((v - v.mean(0)) / v.std(0) for v in (m.body(x), m.body(y)))
        return (one.T @ other / len(x) - torch.eye(16)).square().sum()

    return _made(run, (torch.randn(8, 16), torch.randn(8, 16)), body=_stack())


def root_of_mean() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: (m.body(x) - y).square().mean().sqrt(), (torch.randn(8, 16), torch.randn(8, 16)), body=_stack()
    )


def sum_over_samples() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: (m.body(x) - y).square().sum(), (torch.randn(8, 16), torch.randn(8, 16)), body=_stack()
    )


def sum_of_squares_by_samples() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: (m.body(x) - y).square().sum() / len(x), (torch.randn(8, 16), torch.randn(8, 16)), body=_stack()
    )


def summed_mse() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: functional.mse_loss(m.body(x), y, reduction="sum"),
        (torch.randn(8, 16), torch.randn(8, 16)),
        body=_stack(),
    )


def regression() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: functional.mse_loss(m.body(x), y),
        (torch.randn(8, 16), torch.randn(8, 16)),
        body=_stack(inner=nn.GELU),
    )


def binary() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return functional.binary_cross_entropy_with_logits(m.body(x), y)

    return _made(run, (torch.randn(8, 16), torch.rand(8, 16)), body=_stack(inner=nn.SiLU))


def several_outputs() -> Made:
    torch.manual_seed(0)
    return _made(
        lambda m, x, y: {"a": m.a(m.body(x)), "b": (m.b(x),)},
        (torch.randn(8, 16),),
        body=_stack(),
        a=nn.Linear(16, 4),
        b=nn.Linear(16, 2),
    )


def low_rank() -> Made:
    """Frozen layers with trained factors of low rank beside them."""
    torch.manual_seed(0)
    body = _stack().requires_grad_(False)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        for layer, down, up in zip(m.body[::2], m.down, m.up, strict=True):
            x = (layer(x) + up(down(x))).relu()
        return functional.mse_loss(x, y)

    down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in range(4))
    up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in range(4))
    return _made(run, (torch.randn(8, 16), torch.randn(8, 16)), body=body, down=down, up=up)


def batch_norm() -> Made:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    )

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return functional.cross_entropy(m.head(m.body(x).mean((2, 3))), y)

    return _made(run, (torch.randn(8, 3, 8, 8), _labels(8, classes=5)), body=body, head=nn.Linear(8, 5))


def convolutions() -> Made:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 1),
        nn.MaxPool2d(2),
    )

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return functional.cross_entropy(m.head(m.body(x).flatten(1)), y)

    return _made(run, (torch.randn(8, 3, 8, 8), _labels(8, classes=5)), body=body, head=nn.Linear(72, 5))


def autoencoder() -> Made:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))
    return _made(lambda m, x, y: functional.l1_loss(m.body(x), x), (torch.randn(8, 3, 8, 8),), body=body)


def recurrent() -> Made:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return functional.cross_entropy(m.head(m.lstm(m.words(x))[0][:, -1]), y)

    parts = {"words": nn.Embedding(20, 16), "lstm": nn.LSTM(16, 16, batch_first=True), "head": nn.Linear(16, 5)}
    return _made(run, (torch.randint(0, 20, (8, 6)), _labels(8, classes=5)), **parts)


def mixture() -> Made:
    """Experts that all see each word, weighed by a router."""
    torch.manual_seed(0)

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in m.experts], -1) @ weights.unsqueeze(-1)
        return functional.mse_loss(mixed.squeeze(-1), y)

    experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
    return _made(run, (torch.randn(8, 16), torch.randn(8, 16)), router=nn.Linear(16, 4), experts=experts)


def encoder() -> Made:
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
    )

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        return m.head(m.layers(m.words(x), src_key_padding_mask=y)).mean(1)

    pad = torch.zeros(8, 6, dtype=torch.bool)
    pad[0, 3:] = True
    return _made(
        run, (torch.randint(0, 20, (8, 6)), pad), words=nn.Embedding(20, 16), layers=layers, head=nn.Linear(16, 5)
    )


def _of_transformers(name: str, config: str, inputs: dict[str, Tensor], **sizes: Any) -> Made:
    import transformers

    torch.manual_seed(0)
    given = {"attn_implementation": "eager", **sizes}
    model = getattr(transformers, name)(getattr(transformers, config)(**given))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, (), inputs


def _words(uneven: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(3, 32, (8, 8)), "labels": _labels(8, 8, classes=32, uneven=uneven)}


def gpt2() -> Made:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _of_transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        _words(),
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        **none,
    )


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Made:
    return _of_transformers(
        "LlamaForCausalLM", "LlamaConfig", _words(), num_key_value_heads=2, use_cache=False, **_SMALL
    )


def qwen2() -> Made:
    return _of_transformers(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        _words(),
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=True,
        **_SMALL,
    )


def bert() -> Made:
    return _of_transformers("BertForMaskedLM", "BertConfig", _words(), max_position_embeddings=8, **_SMALL, **_PLAIN)


def question_answering() -> Made:
    torch.manual_seed(0)
    inputs = {
        "input_ids": torch.randint(3, 32, (8, 8)),
        "start_positions": torch.tensor([1, 9, 9, 2, 3, 1, 0, 4]),
        "end_positions": torch.tensor([2, 9, 4, 2, 5, 9, 1, 6]),
    }
    return _of_transformers(
        "BertForQuestionAnswering", "BertConfig", inputs, max_position_embeddings=8, **_SMALL, **_PLAIN
    )


def vit() -> Made:
    torch.manual_seed(0)
    inputs = {"pixel_values": torch.randn(8, 3, 8, 8), "labels": _labels(8, classes=2)}
    sizes = {key: size for key, size in _SMALL.items() if key != "vocab_size"}
    return _of_transformers(
        "ViTForImageClassification", "ViTConfig", inputs, image_size=8, patch_size=4, **sizes, **_PLAIN
    )


def t5() -> Made:
    sizes = {
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    return _of_transformers(
        "T5ForConditionalGeneration", "T5Config", _words(), decoder_start_token_id=0, use_cache=False, **sizes
    )
