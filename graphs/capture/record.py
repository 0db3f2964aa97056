"""Traces by recording: forward and backward of a training step, or a forward pass with its module calls.

The recorder stands below autograd, so one run of the model gives the joint graph of forward and backward. On fake
tensors a run costs no memory and no arithmetic.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._C._autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.again import FIRST_DRAW, reassigned, state_of, write_back
from graphs.capture.casting import cast, dtype_of, follow, in_precision
from graphs.capture.costs import general_kernels, out_of_place, shows_other_memory
from graphs.capture.failure import does_not_fit, reason_of
from graphs.capture.fake import InPlaceViews, is_expanded, run_fake
from graphs.capture.trace import (
    BUFFER,
    CONSTANT,
    PARAMETER,
    Outputs,
    TensorInfo,
    Trace,
    TracedState,
    describe,
    tensor_info,
    with_tensors,
)
from graphs.errors import CaptureError
from graphs.opgraph import Phase
from graphs.recipes import Precision

Loss = Callable[[Any], torch.Tensor]


def trace_training(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    precision: Precision | None = None,
) -> Trace:
    """Forward pass, loss and gradients of all trainable parameters.

    Raises:
        CaptureError: there is nothing to train.
    """
    recorder = Recorder(model, argument_tensors(model, args, kwargs))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise CaptureError(
            f"{type(model).__name__} has no trainable parameter; expected at least one with requires_grad, "
            "capture it with train=False."
        )
    placeholders = [recorder.node_of(p) for p in parameters.values()]
    # Before the run, after which a slice that is all of an argument would be taken for it.
    arguments = {name: recorder.node_of(tensor) for name, tensor in argument_tensors(model, args, kwargs)}
    call, casts = in_precision(model, precision)
    # One thread, so that autograd runs the backward pass where the recorder can see it.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with torch.enable_grad(), one_thread, general_kernels(), recorder, recorder.calls.watched():
        output = call(*args, **kwargs)
        tensors = output_tensors(output)
        nodes = tuple(recorder.node_of(tensor) for tensor in tensors)
        moved = reassigned(recorder, model)
        tangents: dict[int, fx.Node] = {}
        crossed = [
            _Boundary.apply(tensor, recorder, i, tangents)  # type: ignore[no-untyped-call]
            for i, tensor in enumerate(tensors)
        ]
        seen_by_loss = with_tensors(output, zip(tensors, crossed, strict=True))
        value = default_loss(seen_by_loss) if loss is None else _loss_of(loss, seen_by_loss)
        _check_loss(value)
        recorder.phase = Phase.BACKWARD
        if precision is None or not precision.has_narrow_gradients:
            casts = {}
        of = [casts.get(id(p), p) for p in parameters.values()]
        sent = torch.autograd.grad(value, of, allow_unused=True)
        gradients = [_total_gradient(p, gradient) for p, gradient in zip(parameters.values(), sent, strict=True)]
        pairs = [
            (node, _kept_gradient(recorder, gradient, precision))
            for node, gradient in zip(placeholders, gradients, strict=True)
            if gradient is not None
        ]
    write_back(recorder, moved)
    outputs = Outputs.of(output, tensors, nodes, tangents)
    results = (recorder.node_of(value),)
    return Trace(
        recorder.graph,
        recorder.states,
        recorder.inputs,
        results,
        gradients=tuple(pairs),
        outputs=outputs,
        arguments=arguments,
    )


def trace_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    differentiable: bool = False,
    precision: Precision | None = None,
) -> Trace:
    """One forward pass; every op knows the module call it was made in.

    ``differentiable``: under autograd, as in training, where the model may take gradients itself.
    """
    recorder = Recorder(model, argument_tensors(model, args, kwargs))
    call, _ = in_precision(model, precision)
    with torch.set_grad_enabled(differentiable), general_kernels(), recorder, recorder.calls.watched():
        output = call(*args, **kwargs)
    tensors = tuple(output_tensors(output))
    results = tuple(recorder.node_of(tensor) for tensor in tensors)
    write_back(recorder, reassigned(recorder, model))
    arguments = {name: recorder.node_of(tensor) for name, tensor in argument_tensors(model, args, kwargs)}
    for node in recorder.graph.nodes:
        node.meta["phase"] = Phase.FORWARD  # derivatives in the forward pass (physics-informed networks), too
    return Trace(
        recorder.graph,
        recorder.states,
        recorder.inputs,
        results,
        leaves=recorder.calls.leaves,
        outputs=Outputs.of(output, tensors, results, {}),
        arguments=arguments,
    )


def _total_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient with what a backward pass of the model's own (reversible layers) has added to it."""
    if parameter.grad is None or gradient is None:
        return gradient if parameter.grad is None else parameter.grad
    return gradient + parameter.grad


def _kept_gradient(recorder: Recorder, gradient: torch.Tensor, precision: Precision | None) -> fx.Node:
    """The node of a gradient in the format in which it is kept."""
    made = recorder.node_of(gradient)
    if precision is None:
        return made
    kept = recorder.node_of(cast(gradient, dtype_of(precision.gradient)))
    follow(kept, made)
    return kept


class _Boundary(torch.autograd.Function):
    """Between the model and its loss: changes nothing, and notes the gradient that crosses it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, number: int, tangents: dict[int, fx.Node]) -> Any:
        ctx.noted = recorder, number, tangents
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recorder, number, tangents = ctx.noted
        # Another loss may send another number to each element, where the sum of them sends one to all.
        crossing = gradients[0].contiguous() if is_expanded(gradients[0]) else gradients[0].view_as(gradients[0])
        tangents[number] = recorder.node_of(crossing)
        return crossing, None, None, None


def default_loss(output: Any) -> torch.Tensor:
    """A scalar output, the output's ``loss``, or the sum of the means of all floating-point outputs.

    Raises:
        CaptureError: no output is floating-point.
    """
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given.sum()
    tensors = [tensor for tensor in output_tensors(output) if tensor.is_floating_point()]
    if not tensors:
        raise CaptureError(
            f"the model returns {type(output).__name__} without a floating-point tensor; expected an output to train "
            "on, give loss=, a function from the output to a scalar."
        )
    if len(tensors) == 1 and tensors[0].ndim == 0:
        return tensors[0]
    means = [tensor.mean() for tensor in tensors]
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _loss_of(loss: Loss, output: Any) -> torch.Tensor:
    try:
        return loss(output)
    except Exception as error:
        if not does_not_fit(error):
            raise
        raise CaptureError(
            f"loss= does not take the model's output ({reason_of(error)}); "
            "give a function from that output alone to a scalar tensor."
        ) from error


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(f"the loss is {shown}; expected a scalar tensor, reduce it in loss=.")
    if not value.requires_grad:
        raise CaptureError(
            "the loss depends on no trainable parameter; expected a gradient, check for no_grad or detach in forward."
        )


def argument_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of the arguments by its path, which begins with the parameter of ``forward``, whatever way it came.

    Arguments that are not given have their defaults.

    Raises:
        CaptureError: two of them have one path.
    """
    try:
        call = inspect.signature(model.forward).bind(*args, **kwargs)
        call.apply_defaults()
        bound: Mapping[str, Any] = call.arguments
    except (TypeError, ValueError):
        bound = {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}
    found = {}
    for path, value in pytree.tree_flatten_with_path(dict(bound))[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        name = "_".join(keys)
        if name in found:
            raise CaptureError(f"two arguments have the path {name!r}; rename one of them.")
        found[name] = value
    return found


def argument_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor among the arguments."""
    leaves = argument_leaves(model, args, kwargs)
    return [(name, value) for name, value in leaves.items() if isinstance(value, torch.Tensor)]


def output_tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in a nested output, each once; dataclasses and other objects (say, caches) are opened."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif id(value) not in seen and not isinstance(value, (nn.Module, type, str)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                stack += reversed(list(value.values()))
            elif isinstance(value, (list, tuple, set)):
                stack += reversed(list(value))
            else:
                stack += reversed(list(getattr(value, "__dict__", {}).values()))
    return list(found.values())


# -- the recorder ----------------------------------------------------------------------------------------------------


class ModuleCalls:
    """The module that is running: its path and the number of the call, from hooks on every module.

    Attributes:
        leaves: class name of each call that called no other module, by its number.
    """

    def __init__(self, model: nn.Module) -> None:
        self.leaves: dict[int, str] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack: list[tuple[str, int]] = []
        self._count = 0

    @property
    def path(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    @property
    def number(self) -> int | None:
        return self._stack[-1][1] if self._stack else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._stack:
            self.leaves.pop(self._stack[-1][1], None)
        self._stack.append((self._paths.get(id(module), self.path), self._count))
        self.leaves[self._count] = type(module).__name__
        self._count += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operator calls as fx nodes while it is active.

    A backward op is linked to its forward op by autograd's sequence numbers: a forward operator makes its gradient
    function just before it runs, and that function is the current one while the backward operators run.

    Attributes:
        graph, states, inputs: as in `Trace`.
        calls: the module calls seen.
        phase: of the ops recorded from now on, where autograd does not know better.
    """

    def __init__(self, model: nn.Module, inputs: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.states: dict[fx.Node, TracedState] = {}
        self.inputs: dict[fx.Node, str] = {}
        self.calls = ModuleCalls(model)
        self.phase = Phase.FORWARD
        self._nodes: dict[TensorInfo, fx.Node | tuple[fx.Node, int]] = {}
        self._by_storage: dict[int, fx.Node | tuple[fx.Node, int]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._owner: dict[int, fx.Node] = {}
        self._in_place = InPlaceViews()
        self._last_placeholder: fx.Node | None = None
        self._first_sequence = _get_sequence_nr()
        torch.default_generator.manual_seed(FIRST_DRAW)
        for kind, tensors in ((PARAMETER, model.named_parameters), (BUFFER, model.named_buffers)):
            for name, tensor in tensors(remove_duplicate=False):
                self._add_state(name, kind, tensor)
        for name, tensor in inputs:
            node = self._placeholder(name, tensor)
            if node is not None:
                self.inputs[node] = name

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value a tensor is; a tensor from outside the recording becomes a constant."""
        info = tensor_info(tensor)
        found = self._nodes.get(info)
        if found is None:
            base = self._by_storage.get(info.storage)
            if base is None:
                return self._add_state(f"constant_{len(self.states)}", CONSTANT, tensor)
            # A view made out of the recorder's sight.
            node = self.graph.call_function(
                torch.ops.aten.as_strided.default, (self._node(base), *info.layout[:2], info.offset)
            )
            node.meta.update(info=info, module=self.calls.path)
            self._nodes[info] = node
            return node
        node = self._node(found)
        self._nodes[info] = node
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return run_fake(func, args, kwargs)
        sequence = _get_sequence_nr() - 1
        # Before the call, for it may turn an argument into a view of it.
        nodes = self._arguments(args), self._arguments(kwargs)
        output = self._in_place.run(func, args, kwargs, self._nodes)
        # ``resize_`` and ``set_`` compute nothing; who reads their argument finds its memory.
        if not shows_other_memory(func):
            self._record(self.graph.call_function(out_of_place(func), *nodes), output, sequence)
        return output

    def _record(self, node: fx.Node, output: Any, sequence: int) -> None:
        info = describe(output)
        node.meta.update(info=info, module=self.calls.path, call=self.calls.number)
        node.meta["phase"] = self.phase
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            node.meta["draw"] = _next_draw()
            if isinstance(generator := node.kwargs.get("generator"), torch.Generator):
                node.meta["generator"] = state_of(generator)
        gradient_function = torch._C._current_autograd_node()
        if gradient_function is not None:
            node.meta["phase"] = Phase.BACKWARD
            self._mirror(node, self._owner.get(gradient_function._sequence_nr()))
        if sequence >= self._first_sequence:
            self._owner.setdefault(sequence, node)
        self._register(info, output, node)

    def _mirror(self, node: fx.Node, forward: fx.Node | None) -> None:
        # The forward pass may be run again inside the backward pass (checkpointing): follow it to the first run.
        forward = forward.meta.get("mirror", forward) if forward is not None else None
        if forward is not None and forward is not node:
            node.meta["mirror"] = forward
            node.meta["module"] = node.meta["module"] or forward.meta["module"]

    def _register(self, info: Any, output: Any, node: fx.Node) -> None:
        if isinstance(info, TensorInfo):
            self._know(info, output, node)
        elif isinstance(info, tuple):
            for i, (part, tensor) in enumerate(zip(info, output, strict=True)):
                if isinstance(part, TensorInfo):
                    self._know(part, tensor, (node, i))

    def _know(self, info: TensorInfo, tensor: torch.Tensor, node: fx.Node | tuple[fx.Node, int]) -> None:
        self._nodes[info] = node
        self._in_place.made(info)
        if info.storage not in self._storages and info.storage >= 0:
            # A weak reference keeps the address from being used again, without keeping the memory.
            self._storages[info.storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._by_storage.setdefault(info.storage, node)

    def _node(self, found: fx.Node | tuple[fx.Node, int]) -> fx.Node:
        if isinstance(found, fx.Node):
            return found
        source, index = found
        node = self.graph.call_function(operator.getitem, (source, index))
        node.meta.update(info=source.meta["info"][index], module=source.meta["module"])
        return node

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._arguments(item) for item in value) if type(value) in (list, tuple) else value
        if isinstance(value, dict):
            return {key: self._arguments(item) for key, item in value.items()}
        return value

    def _placeholder(self, name: str, tensor: torch.Tensor) -> fx.Node | None:
        info = tensor_info(tensor)
        if info in self._nodes:
            return None
        # Constants turn up in the middle of a run, but belong before it.
        with self.graph.inserting_after(self._last_placeholder):
            node = self._last_placeholder = self.graph.placeholder(name.replace(".", "_"))
        node.meta.update(info=info, module="")
        self._know(info, tensor, node)
        return node

    def _add_state(self, name: str, kind: str, tensor: torch.Tensor) -> fx.Node:
        node = self._placeholder(name, tensor)
        info = tensor_info(tensor)
        if node is None:
            return self._node(self._nodes[info])
        self.states[node] = TracedState(name, kind, info, tensor if kind == CONSTANT else None)
        return node


def _next_draw() -> int:
    """A number for what is drawn next, from the state of the generator.

    Fakes draw nothing, so the state is moved on here. A forward pass that is run again in the backward pass
    (checkpointing) puts the state back to draw the same numbers, and gets the same number here.
    """
    generator = torch.default_generator
    number = generator.initial_seed()
    generator.manual_seed((number + 1) % 2**63)
    return number
