"""Lending a model to a tracer: weights replaced by fakes without memory, everything put back afterwards."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import nn
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphs.capture.costs import out_of_place, signature
from graphs.capture.failure import Untraceable
from graphs.capture.trace import TensorInfo, tensor_info
from graphs.errors import CaptureError

Replace = Callable[[torch.Tensor], torch.Tensor]
_MOST_HELD = 100_000
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Faker:
    """Fake twins of tensors. Tied tensors get one twin, tensors that share memory get twins that share memory.

    All twins are on the CPU, wherever the tensors are: a graph says what is computed, and is the same for a model on a
    GPU, on the CPU and on ``meta``.

    Args:
        formats: of twins that have another one than their tensors, by the ids of these.
    """

    def __init__(self, mode: FakeTensorMode, formats: Mapping[int, torch.dtype] | None = None) -> None:
        self.mode = mode
        self._formats = dict(formats or {})
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._twins.get(id(tensor))
        if known is not None:
            return known[1]
        twin = self._twin(tensor)
        if isinstance(tensor, nn.Parameter):
            # As nn.Parameter does to a tensor subclass, without the copy it makes first.
            twin.requires_grad_(tensor.requires_grad)
            twin._is_param = True
        # The original is held too, so that its id stays its own.
        self._twins[id(tensor)] = (tensor, twin)
        return twin

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor)
        storage, dtype = tensor.untyped_storage(), self._formats.get(id(tensor), tensor.dtype)
        key = (storage._cdata, dtype)
        if key not in self._memory:
            n_elements = storage.nbytes() // tensor.dtype.itemsize
            self._memory[key] = torch.empty(n_elements, dtype=dtype, device="meta")
        shadow = self._memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._fake(shadow, tensor)

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
        twin = self._fake(shadow, tensor)
        self._twins[id(tensor)] = (tensor, twin)
        return twin

    def _fake(self, shadow: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """A twin of a tensor that lies in the memory of a shadow, which is on ``meta``."""
        shadow = shadow.conj() if tensor.is_conj() else shadow
        shadow = torch._neg_view(shadow) if tensor.is_neg() else shadow
        # Made directly: a factory call under the mode takes a hundred times as long, and models have many tensors.
        return FakeTensor(self.mode, shadow, torch.device("cpu"))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether ``expand`` made some of it: elements along a dimension share memory."""
    return any(step == 0 and extent > 1 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


class InPlaceViews:
    """Tensors whose shape was changed in place (``transpose_``), as far as they would get wrong gradients.

    For a fake view, autograd keeps not the strides, as for any other, but how it was made from its base, and makes it
    anew that way when the base has changed. It knows nothing of shapes that were changed in place.
    """

    def __init__(self) -> None:
        self._older: dict[TensorInfo, str] = {}  # views that were made before their base had another shape
        self._turned: dict[int, tuple[str, ReferenceType[Any]]] = {}  # by storage: a view that was given another shape

    def run(self, func: Any, args: Any, kwargs: Any, known: Iterable[TensorInfo]) -> Any:
        """Run a call as `run_fake` does; ``known``: the tensors so far.

        Raises:
            Untraceable: it reads a view that autograd would make anew wrongly, or writes so that it will.
        """
        is_view = out_of_place(func) is not func
        if torch.is_grad_enabled() and (self._older or self._turned):
            self._check(func, args)
        if is_view:
            self._note(signature(func).name, args[0], known)
        try:
            return run_fake(func, args, kwargs)
        except (ValueError, RuntimeError) as error:
            # Autograd has tried to make a view anew.
            bases = {info.storage: by for info, by in self._older.items()}
            for tensor in _tensors_in(args) if signature(func).may_alias else ():
                if tensor.requires_grad and (changed := bases.get(tensor_info(tensor).storage)) is not None:
                    raise _wrong_gradients(signature(func).name, changed) from error
            raise

    def _note(self, name: str, tensor: torch.Tensor, known: Iterable[TensorInfo]) -> None:
        storage = tensor_info(tensor).storage
        if tensor._is_view():
            self._turned[storage] = name, ref(tensor)
        else:
            self._older |= {info: name for info in known if info.storage == storage}

    def _check(self, func: Any, args: Any) -> None:
        given = _tensors_in(args)
        found = [self._older.get(tensor_info(one)) for one in given if one.requires_grad and one._is_view()]
        is_view = out_of_place(func) is not func
        if (is_view or signature(func).writes) and any(tensor.requires_grad for tensor in given):
            changed, view = self._turned.get(tensor_info(given[0]).storage, (None, None))
            # One view may be changed again and again.
            found.append(None if is_view and view is not None and view() is given[0] else changed)
        if changed := next(filter(None, found), None):
            raise _wrong_gradients(signature(func).name, changed)

    def made(self, info: TensorInfo) -> None:
        """A view made now knows the shape that its base has now."""
        self._older.pop(info, None)


def _tensors_in(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def _wrong_gradients(name: str, changed: str) -> Untraceable:
    return Untraceable(
        f"{name} would get wrong gradients, for {changed} has changed the shape of a tensor in place whose memory it "
        "shares",
        f"write x = x.{changed[:-1]}(...) for x.{changed}(...)",
    )


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

    Changes to attributes of the model's modules (new caches, reassigned buffers) are undone too, and changes to what
    these hold: dictionaries, lists, sets, objects, and the variables of hooks.

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
    held = containers(value for _, attributes in saved for value in attributes.values())
    random_state = torch.get_rng_state()
    pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        for module, _ in saved:
            _replace_tensors(module, replace)
        set_mode(model, train)
        with _autocast_on_cpu(), _DevicesOnCpu():
            yield
    finally:
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in held:
            _refill(container, content)
        torch.set_rng_state(random_state)
        drawn = _drawn_since(pythons, numpys)
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002
    if drawn:
        warnings.warn(
            f"{type(model).__name__} draws from {drawn} when it runs; what is captured is one draw, and a placement "
            "runs that one in every step (with LayerDrop always the same layers): draw by torch.rand, or leave it out",
            stacklevel=2,
        )


def set_mode(model: nn.Module, train: bool) -> None:
    """Bring a model into training or evaluation mode; one that trains already keeps parts of it in evaluation mode."""
    if not train or not model.training:
        model.train(train)


def _drawn_since(pythons: Any, numpys: Any) -> str:
    """Name of a generator that has drawn since it had the given state, as no graph can; "" if none has."""
    if random.getstate() != pythons:
        return "Python's random"
    now: Any = np.random.get_state()  # noqa: NPY002
    return "" if now[2:] == numpys[2:] and np.array_equal(now[1], numpys[1]) else "numpy.random"


@contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    """Run regions of ``torch.autocast("cuda")`` as the CPU's of their dtype, where the twins of tensors are."""
    kind, changed = torch.autocast, []
    begin, enter = kind.__init__, kind.__enter__

    def begins(
        region: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begin(region, device_type, dtype, enabled, cache_enabled)

    def enters(region: Any) -> Any:
        if region.device == "cuda":  # made before (a decorator), and off since then
            changed.append((region, region._enabled))
            region.device, region._enabled = "cpu", region.fast_dtype == torch.bfloat16
        return enter(region)  # type: ignore[no-untyped-call]

    kind.__init__, kind.__enter__ = begins, enters  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        kind.__init__, kind.__enter__ = begin, enter  # type: ignore[method-assign]
        for region, was in changed:
            region.device, region._enabled = "cuda", was


class _DevicesOnCpu(TorchFunctionMode):
    """Makes and moves tensors on the CPU where a model names a GPU: the twins of its own tensors are there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(value) if isinstance(value, (str, torch.device)) else value for value in args)
        if named.get("device") is not None:
            named["device"] = _on_cpu(named["device"])
        return func(*args, **named)


def _on_cpu(device: Any) -> Any:
    return torch.device("cpu") if torch.device(device).type == "cuda" else device


def _replace_tensors(module: nn.Module, replace: Replace) -> None:
    # New dictionaries, so that the model's own ones are never written.
    for kind in ("_parameters", "_buffers"):
        tensors = module.__dict__[kind]
        module.__dict__[kind] = {name: None if t is None else replace(t) for name, t in tensors.items()}
    module.__dict__["_modules"] = dict(module._modules)
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch.Tensor):
            module.__dict__[name] = replace(value)


_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


def containers(values: Iterable[Any]) -> list[tuple[_Container, Any]]:
    """Mutable containers among values and in them, each with a copy of its content; `_MOST_HELD` at most."""
    found: list[tuple[_Container, Any]] = []
    seen: set[int] = set()
    stack = list(values)
    while stack and len(seen) < _MOST_HELD:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (torch.Tensor, nn.Module, type, ModuleType, str, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, deque)):
            content = content_of(value)
            found.append((value, content))
            stack += content.values() if isinstance(content, dict) else content
        elif isinstance(value, tuple):
            stack += value
        elif isinstance(value, FunctionType):
            stack += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        elif isinstance(value, MethodType):
            stack.append(value.__self__)
        elif hasattr(value, "__dict__"):
            stack.append(vars(value))
    return found


def content_of(container: _Container) -> Any:
    """A copy of what a container holds."""
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: _Container, content: Any) -> None:
    if isinstance(container, dict):
        is_same = [*map(id, container.values())] == [*map(id, content.values())] and [*container] == [*content]
    else:
        is_same = [*map(id, container)] == [*map(id, content)]
    if is_same:
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
