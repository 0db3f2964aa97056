"""Capture by module: no tracing, one hooked run, one op per call of a leaf module.

The way out for models that cannot be traced. A model whose control flow depends on data is run once for real if it has
real weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from graphs.capture_drafts import Draft, Drafts, Value, update_draft
from graphs.capture_emit import emit
from graphs.capture_failure import capture_failure
from graphs.capture_fake import Faker, borrowed
from graphs.capture_joint import trace_forward
from graphs.capture_lower import lower
from graphs.capture_merge import merge_by_call
from graphs.capture_optimizers import Optimizer
from graphs.capture_trace import PARAMETER, Trace
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph, Phase


def capture_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    optimizer: Optimizer,
    name: str,
) -> OpGraph:
    """The graph of a model at module granularity.

    Raises:
        CaptureError: the model does not run on these inputs.
    """
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    trace = _trace(model, args, dict(kwargs), train)
    drafts = merge_by_call(lower(trace, optimizer), trace.leaves)
    if train:
        _add_backward(drafts, trained)
        _add_updates(drafts, optimizer)
    return emit(drafts, name)


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = Faker(mode)
    is_real = _is_real(model, args, kwargs)
    try:
        fake_args, fake_kwargs = fake.arguments((args, kwargs))
        with borrowed(model, train, fake), mode:
            return trace_forward(model, fake_args, fake_kwargs)
    except PlacementError:
        raise
    except Exception as error:
        if not is_real:
            way_out = "give the model real weights and inputs, so that it can be run once"
            raise capture_failure(model, error, way_out) from error
    try:
        copies = _Copies()
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, copies, (args, kwargs))
        with borrowed(model, train, copies):
            return trace_forward(model, real_args, real_kwargs)
    except Exception as error:
        raise capture_failure(
            model, error, "check that the model runs on these inputs, else rewrite that line"
        ) from error


class _Copies:
    """Copies of everything a forward pass may write; parameters are only read."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return self._copies.setdefault(id(tensor), tensor.detach().clone())


def _is_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *given]
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def _add_backward(drafts: Drafts, trained: set[str]) -> None:
    """Mirror every op that a trained parameter feeds: twice its work, edges reversed, its inputs read again.

    An estimate: it takes an op to save its inputs, and each gradient to have the size of what it is the gradient of.
    An op whose inputs need no gradient does half of it, the weight gradients alone.
    """
    forward = list(drafts.ops)
    is_trained = [state.kind == PARAMETER and state.name in trained for state in drafts.states]
    flows = _gradient_flow(drafts, is_trained)
    readers = drafts.readers([True] * len(forward))
    gradient_for: dict[tuple[int, int], int] = {}  # (forward value, its reader) -> value holding that reader's share
    for i in reversed(range(len(forward))):
        if not flows[i]:
            continue
        op = forward[i]
        through = [v for v in op.inputs if _carries(drafts, v, flows)]
        own = [state for state in op.states if is_trained[state]]
        share = 1 if own and not through else 2
        number = drafts.add(
            Draft(
                label=f"{op.label}.backward" if op.label else "backward",
                kind=f"{op.kind}.backward",
                module=op.module,
                dtype=op.dtype,
                flops=share * op.flops,
                kernels=share * op.kernels,
                moved_bytes=share * op.moved_bytes,
                workspace_bytes=op.workspace_bytes,
                phase=Phase.BACKWARD,
                states=list(op.states),
                mirror=i,
            )
        )
        incoming = [gradient_for[v, r] for v in op.outputs for r in readers[v] if (v, r) in gradient_for]
        seeds = [v for v in op.outputs if drafts.values[v].is_result]
        drafts.ops[number].inputs = list(dict.fromkeys((*incoming, *seeds, *op.inputs)))
        for v in through:
            gradient_for[v, i] = drafts.add_value(Value(number, drafts.values[v].size_bytes))
        for state in own:
            drafts.add_value(Value(number, drafts.states[state].size_bytes, gradient_of=[state]))


def _gradient_flow(drafts: Drafts, is_trained: list[bool]) -> list[bool]:
    """Which ops a trained parameter feeds; ops are in topological order."""
    flows: list[bool] = []
    for op in drafts.ops:
        flows.append(False)
        flows[-1] = any(is_trained[state] for state in op.states) or any(_carries(drafts, v, flows) for v in op.inputs)
    return flows


def _carries(drafts: Drafts, value: int, flows: list[bool]) -> bool:
    return drafts.values[value].is_float and flows[drafts.values[value].producer]


def _add_updates(drafts: Drafts, optimizer: Optimizer) -> None:
    gradients: dict[int, list[int]] = {}
    for number, value in enumerate(drafts.values):
        for state in value.gradient_of:
            gradients.setdefault(state, []).append(number)
    for state, values in sorted(gradients.items()):
        drafts.add(update_draft(drafts.states[state], state, values, optimizer))
