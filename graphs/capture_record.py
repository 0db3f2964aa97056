"""A recorder of every operator a model runs, in its forward pass and, through autograd, in its backward pass.

It stands below autograd, so one run gives the joint graph. On fake tensors a run costs no memory and no arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._C._autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture_trace import BUFFER, CONSTANT, PARAMETER, State
from graphs.capture_values import TensorInfo, describe, tensor_info
from graphs.opgraph import Phase


class ModuleCalls:
    """Which module is running: its path and the number of the call, from hooks on every module.

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
        self.states: dict[fx.Node, State] = {}
        self.inputs: dict[fx.Node, str] = {}
        self.calls = ModuleCalls(model)
        self.phase = Phase.FORWARD
        self._nodes: dict[TensorInfo, fx.Node | tuple[fx.Node, int]] = {}
        self._by_storage: dict[int, fx.Node | tuple[fx.Node, int]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._owner: dict[int, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._first_sequence = _get_sequence_nr()
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
            node = self.graph.call_function(torch.ops.aten.alias.default, (self._node(base),))
            node.meta.update(info=info, module=self.calls.path)
            self._nodes[info] = node
            return node
        node = self._node(found)
        self._nodes[info] = node
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sequence = _get_sequence_nr() - 1
        output = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._record(func, args, kwargs or {}, output, sequence)
        return output

    def _record(self, func: Any, args: Any, kwargs: Any, output: Any, sequence: int) -> None:
        node = self.graph.call_function(func, self._arguments(args), self._arguments(kwargs))
        info = describe(output)
        node.meta.update(info=info, module=self.calls.path, call=self.calls.number)
        node.meta["phase"] = self.phase
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
        self.states[node] = State(name, kind, info)
        return node
