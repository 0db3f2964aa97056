"""Lending a model to a tracer: weights replaced by fakes without memory, everything put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from graphs.errors import CaptureError

Replace = Callable[[torch.Tensor], torch.Tensor]
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Faker:
    """Fake twins of tensors. Tied tensors get one twin, tensors that share memory get twins that share memory.

    Tensors on ``meta`` get twins on the CPU, so that models built without weights meet their inputs on one device.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._twins.get(id(tensor))
        if known is not None:
            return known[1]
        twin = self._twin(tensor)
        if isinstance(tensor, nn.Parameter):
            # What nn.Parameter does to a tensor subclass, without the copy it makes first.
            twin.requires_grad_(tensor.requires_grad)
            twin._is_param = True
        # The original is held too, so that its id stays its own.
        self._twins[id(tensor)] = (tensor, twin)
        return twin

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        if key not in self._memory:
            n_elements = storage.nbytes() // tensor.dtype.itemsize
            self._memory[key] = torch.empty(n_elements, dtype=tensor.dtype, device="meta")
        shadow = self._memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        # Made directly: a factory call under the mode takes a hundred times as long, and models have many tensors.
        return FakeTensor(self.mode, shadow, self._device(tensor))

    def originals(self) -> dict[int, torch.Tensor]:
        """The tensor behind each twin, by the twin's id."""
        return {id(twin): tensor for tensor, twin in self._twins.values()}

    def arguments(self, value: Any) -> Any:
        """Positional or keyword arguments with a twin for each tensor, which shares memory with no other.

        Two views of one tensor now may be two tensors in the next call, and what ``expand`` made now may differ from
        row to row then.
        """
        return pytree.tree_map_only(torch.Tensor, self._argument, value)

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._twins or type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
            return self(tensor)
        shadow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        shadow = torch.empty_like(shadow) if is_expanded(shadow) else shadow
        twin = FakeTensor(self.mode, shadow, self._device(tensor))
        self._twins[id(tensor)] = (tensor, twin)
        return twin

    @staticmethod
    def _device(tensor: torch.Tensor) -> torch.device:
        return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether ``expand`` made some of it: elements along a dimension share memory."""
    return any(step == 0 and extent > 1 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


def run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, on fake tensors also where its kernel takes more dtypes than its fake does."""
    if func is torch.ops.aten._grouped_mm.default and type(args[0]) is FakeTensor:
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        out_dtype = kwargs.get("out_dtype")
        return _create_grouped_mm_output_tensor(args[0], args[1], offsets, out_dtype)  # type: ignore[no-untyped-call]
    return func(*args, **kwargs)


@contextmanager
def borrowed(model: nn.Module, train: bool, replace: Replace) -> Iterator[None]:
    """Run a block with the model in training or evaluation mode and its tensors replaced; put all back afterwards.

    Whatever the block does to attributes of the model's modules (new caches, reassigned buffers) is undone too.

    Raises:
        CaptureError: a lazy module has not seen its first input.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if any(is_lazy(p) for p in module._parameters.values()):
            raise CaptureError(
                f"module {path!r} ({type(module).__name__}) is lazy and has no weights yet; expected known shapes, "
                "run the model once before capturing it."
            )
    saved = [(module, dict(module.__dict__)) for module in modules.values()]
    random_state = torch.get_rng_state()
    try:
        for module, _ in saved:
            _replace_tensors(module, replace)
            module.training = train
        yield
    finally:
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        torch.set_rng_state(random_state)


def _replace_tensors(module: nn.Module, replace: Replace) -> None:
    # New dictionaries, so that the model's own ones are never written.
    for kind in ("_parameters", "_buffers"):
        tensors = module.__dict__[kind]
        module.__dict__[kind] = {name: None if t is None else replace(t) for name, t in tensors.items()}
    module.__dict__["_modules"] = dict(module._modules)
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch.Tensor):
            module.__dict__[name] = replace(value)
