"""Pieces of models of sequences: they take and give `[BATCH, LENGTH, WIDTH]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.wide_net.pieces import LENGTH, WIDTH, Function, Table, functions

HEADS, EACH = 2, WIDTH // 2


class _Attention(nn.Module):
    """Projections to heads, something done to queries and keys, and attention by a function of the three."""

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        turn: Callable[[Tensor], Tensor] = lambda h: h,
        groups: int = HEADS,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.attend, self.turn, self.groups, self.fused = attend, turn, groups, fused
        if fused:
            self.all = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, groups * EACH)
            self.value = nn.Linear(WIDTH, groups * EACH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.all(h).chunk(3, -1) if self.fused else (self.query(h), self.key(h), self.value(h))
        q, k, v = (t.unflatten(-1, (-1, EACH)).transpose(1, 2) for t in (q, k, v))
        return self.out(self.attend(self.turn(q), self.turn(k), v).transpose(1, 2).flatten(2))


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / EACH**0.5).softmax(-1) @ v


def _causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _with_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    bias = (places[None] - places[:, None]).abs() * torch.tensor([0.5, 0.25])[:, None, None]
    return (q @ k.transpose(-1, -2) - bias).softmax(-1) @ v


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _by_hand(q, *(t.repeat_interleave(HEADS, 1) for t in (k, v)))


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(-1, -1, HEADS, -1, -1).flatten(1, 2) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v)


def _by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a mask that the keys give."""
    kept = k.detach()[..., 0] > -2
    return functional.scaled_dot_product_attention(q, k, v, kept[:, :, None].expand(-1, -1, LENGTH, -1))


def _angles() -> Tensor:
    return torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)


def _turned_by_complex(h: Tensor) -> Tensor:
    table = torch.polar(torch.ones_like(_angles()), _angles())
    return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (2, 2)).contiguous()) * table).flatten(-2)


def _turned_by_halves(h: Tensor) -> Tensor:
    angles = torch.cat([_angles()] * 2, -1)
    return h * angles.cos() + torch.cat([-h[..., 2:], h[..., :2]], -1) * angles.sin()


def _turned_by_pairs(h: Tensor) -> Tensor:
    a, b, angles = h[..., ::2], h[..., 1::2], _angles()
    return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)


class _Multihead(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself, or of learned queries with it, by rows or by columns."""

    def __init__(self, crossed: bool = False, batch_first: bool = True, causal: bool = False, **settings: Any) -> None:
        super().__init__()
        self.crossed, self.batch_first, self.causal = crossed, batch_first, causal
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **settings)
        if crossed:
            self.queries = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        q = self.queries.expand(len(h), -1, -1) if self.crossed else h
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH).to(h.dtype) if self.causal else None
        if self.batch_first:
            made: Tensor = self.inner(q, h, h, attn_mask=mask, need_weights=False)[0]
        else:
            made = self.inner(*(t.transpose(0, 1) for t in (q, h, h)), attn_mask=mask)[0].transpose(0, 1)
        return made


class _Bias(nn.Module):
    """Attention with a learned bias by distance, looked up in a table as Swin and T5 do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * LENGTH - 1, HEADS)
        self.inner = _Attention(self._attend, fused=True)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        bias = self.table(places[None] - places[:, None] + LENGTH - 1).permute(2, 0, 1)[None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h)


ATTENTION: Table = {
    "by_hand": lambda: _Attention(_by_hand),
    "fused_by_hand": lambda: _Attention(_by_hand, fused=True),
    "causal": lambda: _Attention(_causal_by_hand),
    "sdpa": lambda: _Attention(functional.scaled_dot_product_attention),
    "sdpa_causal": lambda: _Attention(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), fused=True
    ),
    "slopes": lambda: _Attention(_with_slopes),
    "linear_attention": lambda: _Attention(_linear),
    "grouped_repeated": lambda: _Attention(_repeated, groups=1),
    "grouped_expanded": lambda: _Attention(_expanded, groups=1),
    "grouped_sdpa": lambda: _Attention(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), groups=1
    ),
    "mask_of_keys": lambda: _Attention(_by_key),
    "rotary_complex": lambda: _Attention(_by_hand, _turned_by_complex),
    "rotary_halves": lambda: _Attention(functional.scaled_dot_product_attention, _turned_by_halves),
    "rotary_pairs": lambda: _Attention(_by_hand, _turned_by_pairs, fused=True),
    "normed_queries": lambda: _Attention(_by_hand, lambda h: functional.normalize(h, dim=-1)),
    "mha": lambda: _Multihead(),
    "mha_causal": lambda: _Multihead(causal=True),
    "mha_by_columns": lambda: _Multihead(batch_first=False),
    "mha_crossed": lambda: _Multihead(crossed=True),
    "mha_crossed_by_columns": lambda: _Multihead(crossed=True, batch_first=False),
    "mha_with_bias_kv": lambda: _Multihead(add_bias_kv=True),
    "distance_bias": _Bias,
    "encoder_layer": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.1, batch_first=True),
    "encoder_layer_norm_first": lambda: nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, 0.0, "gelu", batch_first=True, norm_first=True
    ),
    "decoder_layer": lambda: Function(
        lambda h, inner: inner(h, h.flip(1)), nn.TransformerDecoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True)
    ),
}


class _Recurrent(nn.Module):
    """A layer over time, by rows or by columns."""

    def __init__(self, kind: Callable[..., nn.Module], batch_first: bool, **settings: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        width = WIDTH // 2 if settings.get("bidirectional") else WIDTH
        self.inner = kind(WIDTH, width, batch_first=batch_first, **settings)

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = self.inner(h)[0] if self.batch_first else self.inner(h.transpose(0, 1))[0].transpose(0, 1)
        return made


class _Cells(nn.Module):
    """A cell in a loop over time."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        state, made = None, []
        for step in h.unbind(1):
            state = self.cell(step, state)
            made.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(made, 1)


def _scanned(h: Tensor, decay: Tensor) -> Tensor:
    """A diagonal state space, step by step."""
    state, made = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = state * decay.sigmoid() + h[:, t]
        made.append(state)
    return torch.stack(made, 1)


RECURRENT: Table = {
    **{
        f"{kind.__name__}_{'rows' if first else 'columns'}": lambda kind=kind, first=first: _Recurrent(kind, first)
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for first in (True, False)
    },
    "LSTM_both_ways": lambda: _Recurrent(nn.LSTM, True, bidirectional=True),
    "GRU_both_ways": lambda: _Recurrent(nn.GRU, False, bidirectional=True),
    "LSTM_of_two": lambda: _Recurrent(nn.LSTM, True, num_layers=2, dropout=0.1),
    "GRU_of_two": lambda: _Recurrent(nn.GRU, True, num_layers=2),
    "LSTM_projected": lambda: _Recurrent(
        lambda *sizes, **settings: nn.LSTM(WIDTH, 12, proj_size=WIDTH, **settings), True
    ),
    "RNNCell": lambda: _Cells(nn.RNNCell),
    "GRUCell": lambda: _Cells(nn.GRUCell),
    "LSTMCell": lambda: _Cells(nn.LSTMCell),
    "state_space": lambda: Function(_scanned, torch.randn(WIDTH)),
}


def _over_words(module: nn.Module) -> nn.Module:
    """A module of channels, on words whose features are the channels."""
    return Function(lambda h, inner: inner(h.transpose(1, 2)).transpose(1, 2), module)


PLACES: Table = functions(
    {
        "words_shifted": lambda h: torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1),
        "words_rolled": lambda h: h + h.roll(-1, 1),
        "words_flipped": lambda h: h.flip(1),
        "words_cumsum": lambda h: h.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None],
        "words_mean_added": lambda h: h + h.mean(1, keepdim=True),
        "words_pooled": lambda h: functional.avg_pool1d(h.transpose(1, 2), 2).repeat_interleave(2, 2).transpose(1, 2),
        "words_in_pairs": lambda h: h.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        "words_in_windows": lambda h: h.unflatten(1, (2, -1)).softmax(2).flatten(1, 2),
        "first_word_twice": lambda h: torch.cat([h[:, :1], h], 1)[:, :-1],
        "last_word_added": lambda h: h + h[:, -1:],
        "word_of_each": lambda h: h + h[torch.arange(len(h)), h.detach()[..., 0].argmax(1)][:, None],
        "words_padded": lambda h: functional.pad(h, (0, 0, 2, 0))[:, :-2],
        "words_unfolded": lambda h: functional.pad(h, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1),
        "words_by_words": lambda h: torch.bmm(torch.bmm(h, h.transpose(1, 2)).softmax(-1), h),
        "folded_into_batch": lambda h: h.flatten(0, 1).tanh().unflatten(0, (-1, LENGTH)),
        "folded_norm": lambda h: functional.layer_norm(h.flatten(1), (LENGTH * WIDTH,)).view(h.shape),
        "words_masked": lambda h: h * (torch.arange(LENGTH) < 4)[:, None],
        "words_sorted": lambda h: h.gather(1, h.detach().argsort(1)),
        "softmax_of_words": lambda h: h.softmax(1),
        "words_fft": lambda h: torch.fft.fft2(h, dim=(1, 2)).real / 4,
        "words_maximum": lambda h: h - h.amax(1, keepdim=True),
        "patches_of_words": lambda h: h.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2),
    }
) | {
    "positions": lambda: Function(lambda h, table: h + table, torch.randn(LENGTH, WIDTH)),
    "positions_of_table": lambda: Function(
        lambda h, table: h + table(torch.arange(h.shape[1])), nn.Embedding(LENGTH, WIDTH)
    ),
    "positions_sliced": lambda: Function(lambda h, table: h + table[:, : h.shape[1]], torch.randn(1, 9, WIDTH)),
    "class_token": lambda: Function(
        lambda h, token: torch.cat([token.expand(len(h), -1, -1), h[:, 1:]], 1), torch.randn(1, 1, WIDTH)
    ),
    "words_mixed": lambda: _over_words(nn.Linear(LENGTH, LENGTH)),
    "words_convolved": lambda: _over_words(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "words_convolved_causal": lambda: _over_words(
        Function(lambda h, inner: inner(functional.pad(h, (2, 0))), nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH))
    ),
    "batch_norm_of_words": lambda: _over_words(nn.BatchNorm1d(WIDTH)),
    "instance_norm_of_words": lambda: _over_words(nn.InstanceNorm1d(WIDTH, affine=True)),
    "group_norm_of_words": lambda: _over_words(nn.GroupNorm(2, WIDTH)),
}

WORDS: dict[str, Table] = {"attention": ATTENTION, "recurrent": RECURRENT, "places": PLACES}
