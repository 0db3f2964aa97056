"""Attention on stretches of the queries, with all keys and values.

Causal attention of a stretch is made of two blocks of keys: those before the stretch, which all of its queries see, and
those of the stretch itself, which is causal as the whole is. Their results are put together by their log-sum-exps, as
ring attention does it (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section
3), so that the kernel of the model runs, which need not take a mask, and no key after the stretch is looked at. A part
with several stretches, as a balanced one has, has such calls for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall

ATTENTION = Handlers()
_FORWARD = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
)
_BACKWARD = tuple(f"{name}_backward" for name in _FORWARD)
_ALIGNED = 32  # queries to which log-sum-exps of memory-efficient attention are padded


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CausalStretch:
    """Causal attention of queries ``low`` to ``high``; its results are those of the operator, for these queries.

    Attributes:
        target: the operator; the first two of its results are the attention and the log-sum-exps of its scores.
        names: of its arguments.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    low: int
    high: int
    __name__ = "causal_stretch"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if "compute_log_sumexp" in self.names:
            given["compute_log_sumexp"] = True
        own = self.target(**block(given, self.low, self.high, is_causal=True))
        if not self.low:
            return own
        before = self.target(**block(given, 0, self.low, is_causal=False))
        return *put_together(own[:2], before[:2]), *own[2:]


def put_together(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, H, L, D] and log-sum-exps [B, H, L] or [B, H, L, 1] to two blocks of keys, as to both."""
    total = torch.logaddexp(one[1], other[1])
    result = torch.zeros((), dtype=total.dtype, device=total.device)
    for made, scores in (one, other):
        share = (scores - total).exp_()
        result = result + made * (share if share.ndim == made.ndim else share[..., None])
    return result.to(one[0].dtype), total


@dataclass(frozen=True)
class CausalStretchBackward:
    """Gradients of causal attention of queries ``low`` to ``high``: of these, and summands of those of keys and values.

    Each block's gradients are the operator's own, given the attention and log-sum-exps of all blocks.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    low: int
    high: int
    __name__ = "causal_stretch_backward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        of_query, *own = self.target(**block(given, self.low, self.high, is_causal=True))
        made = [torch.zeros_like(given[name]) for name in ("key", "value")]
        for whole, part in zip(made, own, strict=False):
            whole[:, :, self.low : self.high] = part
        if self.low:
            more, *before = self.target(**block(given, 0, self.low, is_causal=False))
            of_query = of_query + more
            for whole, part in zip(made, before, strict=False):
                whole[:, :, : self.low] = part
        return of_query, *made, *own[2:]


@dataclass(frozen=True)
class CausalStretchByMask:
    """As `CausalStretch`, of the operator for inference, which gives no log-sum-exps but takes a mask."""

    target: Callable[..., Any]
    names: tuple[str, ...]
    low: int
    high: int
    __name__ = "causal_stretch_by_mask"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        given = block(given, 0, self.high, is_causal=not self.low)
        if self.low:
            ones = torch.ones(self.high - self.low, self.high, dtype=torch.bool, device=given["query"].device)
            given["attn_mask"] = ones.tril_(self.low)
        made: torch.Tensor = self.target(**given)
        return made


@dataclass(frozen=True)
class CausalStretches:
    """Several stretches of the queries, side by side in the arguments and in the results.

    Attributes:
        target: the operator.
        names: of its arguments.
        kind: of the calls, one for each stretch: `CausalStretch` or one like it.
        stretches: ``(low, high)`` of each, increasing.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    kind: Callable[..., Any]
    stretches: tuple[tuple[int, int], ...]
    __name__ = "causal_stretches"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        made, start = [], 0
        for low, high in self.stretches:
            stop = start + high - low
            made.append(self.kind(self.target, self.names, low, high)(**of_queries(given, start, stop)))
            start = stop
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made, 2)
        if self.kind is CausalStretchBackward:  # whose gradients of keys and values are summands
            summands = zip(*(gradients[1:3] for gradients in made), strict=True)
            return torch.cat([gradients[0] for gradients in made], 2), *map(sum, summands), *made[0][3:]
        return *(torch.cat(parts, 2) for parts in zip(*(results[:2] for results in made), strict=True)), *made[0][2:]


def of_queries(given: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The arguments of an attention, or of its gradients, with some of its queries alone."""
    names = ("query", "grad_out", "grad_out_", "out", "logsumexp")
    return given | {name: given[name][:, :, start:stop].contiguous() for name in names if name in given}


def block(given: dict[str, Any], start: int, stop: int, is_causal: bool) -> dict[str, Any]:
    """The arguments of an attention with some of its keys and values alone."""
    found = {**given, "is_causal": is_causal}
    found |= {name: given[name][:, :, start:stop] for name in ("key", "value")}
    if "max_k" in given:
        found |= {"max_q": given["query"].shape[2], "max_k": stop - start}
    return found


# -- calls -------------------------------------------------------------------------------------------------------------


@ATTENTION.on("scaled_dot_product_attention", *_FORWARD, *_BACKWARD)
def _attention(call: PartCall) -> LocalCall:
    query = call["query"].part
    length = query.shape[2]
    stretches = query.runs(2)
    if stretches == ((0, length),):
        return call.plain()
    for words in (high - low for low, high in stretches):
        if "efficient" in call.name and words % _ALIGNED:
            raise call.refused(f"its kernel pads log-sum-exps to {_ALIGNED} words, and a stretch has {words}")
    if not call["is_causal"]:
        here = sum(high - low for low, high in stretches)
        return call.plain(**({"max_q": here} if call["max_q"] is not None else {}))
    names = tuple(argument.name for argument in call.target._schema.arguments)  # type: ignore[attr-defined]
    kind: Callable[..., Any] = CausalStretchBackward if call.name in _BACKWARD else CausalStretch
    if call.name == "scaled_dot_product_attention":
        kind = CausalStretchByMask
    if len(stretches) == 1:
        return call.plain(kind(call.target, names, *stretches[0]))
    return call.plain(CausalStretches(call.target, names, kind, stretches))
