"""`run_on`: the code of a device, whose calls make their tensors there, by kernels that the device has.

A graph is captured on the CPU. Its calls name that device where they make tensors, and CPU kernels where the dispatcher
has chosen one: attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


def run_on(graph: fx.Graph, place: torch.device) -> None:
    """Change the calls of a graph to those of a device."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.args, node.kwargs = _there(node.args, place), _there(node.kwargs, place)
        if node.target is under_autocast:
            node.args = ((place.type, *node.args[0][1:]), *node.args[1:])
        if place.type == "cuda":
            node.target = _kernel(node.target)


def _there(value: Any, place: torch.device) -> Any:
    """Arguments with the device they name replaced, and operators in them by those of the device."""
    if isinstance(value, torch.device):
        return place
    if isinstance(value, (tuple, list)):
        return type(value)(_there(item, place) for item in value)
    if isinstance(value, dict):
        return {key: _there(item, place) for key, item in value.items()}
    return _kernel(value) if place.type == "cuda" and callable(value) else value


def _kernel(target: Any) -> Any:
    """The call of a GPU in the place of a CPU's."""
    return _ON_GPU.get(target, target) if isinstance(target, torch._ops.OpOverload) else target


def under_autocast(settings: tuple[Any, ...], target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one call under the autocast region that it was captured in."""
    device_type, dtype, enabled, cache_enabled = settings
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return target(*args, **kwargs)


# -- attention -------------------------------------------------------------------------------------------------------


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of ``_scaled_dot_product_flash_attention_for_cpu``, by kernels of a GPU.

    Returns:
        attention [B, H, L, D] and log-sum-exps [B, H, L]; with a mask these are zeros, and the backward pass runs the
        forward pass again.
    """
    if attn_mask is not None:
        made = _whole(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return made, query.new_zeros(query.shape[:-1], dtype=torch.float32)
    if query.dtype in _HALVES:
        found = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return found[0], found[1]
    found = _ATEN._scaled_dot_product_efficient_attention(
        query, _of_all_heads(key, query), _of_all_heads(value, query), None, True, dropout_p, is_causal, scale=scale
    )
    return found[0], found[1]


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *saved: Any,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention`'s query, key and value.

    Args:
        saved: its two results, the share that dropout takes, and whether it is causal.
    """
    out, logsumexp, dropout_p, is_causal = saved
    if attn_mask is not None:
        with torch.enable_grad():
            given = [one.detach().requires_grad_() for one in (query, key, value)]
            made = _whole(given[0], given[1], given[2], attn_mask, dropout_p, is_causal, scale)
        found = torch.autograd.grad(made, given, grad_out)
        return found[0], found[1], found[2]
    # Random numbers of dropout, which CPU kernels have not.
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if query.dtype in _HALVES:
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            *(grad_out, query, key, value, out, logsumexp, None, None, query.shape[2], key.shape[2]),
            *(dropout_p, is_causal, none, none[0]),
            scale=scale,
        )
        return found[0], found[1], found[2]
    found = _ATEN._scaled_dot_product_efficient_attention_backward(
        *(grad_out, query, _of_all_heads(key, query), _of_all_heads(value, query), None, out, logsumexp),
        *(none[0].long(), none[1].long(), dropout_p, [True, True, True, False], is_causal),
        scale=scale,
    )
    heads = key.shape[1]
    return found[0], *(one.unflatten(1, (heads, -1)).sum(2) for one in found[1:3])


def _of_all_heads(shared: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with a head for each of the queries, where several of these share one."""
    times = query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, 1)


def _whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


_ON_GPU: dict[Any, Callable[..., Any]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
