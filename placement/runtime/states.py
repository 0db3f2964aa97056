"""`with_masters`: an optimizer that updates wide copies of narrow parameters, as Megatron-LM's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from graphs.capture.casting import cast, cast_inside, dtype_of, is_convertible, kept_formats
from graphs.errors import MismatchError
from graphs.recipes import Precision


def convert(model: nn.Module, precision: Precision) -> None:
    """Give a model the formats in which it was captured; its parameters stay the objects they are."""
    formats = kept_formats(model, precision)
    for parameter in model.parameters():
        if id(parameter) in formats:
            parameter.data = cast(parameter.data, formats[id(parameter)])
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in formats:
                module._buffers[name] = made.setdefault(id(buffer), cast(buffer, formats[id(buffer)]))


def gradient_format(parameter: torch.Tensor) -> torch.dtype | None:
    """The format of a parameter's ``grad``; None for that of whatever gradient comes.

    That of the parameter where torch is older than `torch.Tensor.grad_dtype`.
    """
    return getattr(parameter, "grad_dtype", parameter.dtype)


def accept_gradients(model: nn.Module, precision: Precision) -> None:
    """Let ``grad`` of parameters be wider than they are, where gradients are kept so (`torch.Tensor.grad_dtype`)."""
    if precision.has_masters:
        for parameter in model.parameters():
            if parameter.requires_grad and is_convertible(parameter):
                parameter.grad_dtype = dtype_of(precision.gradient)


def compute_in(model: nn.Module, precision: Precision) -> Callable[[], None]:
    """Let calls of a model, which has the formats of a precision, compute in it: op for op what is captured of it.

    Returns:
        The call that ends it.
    """
    kept: list[dict[str, Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        kept.extend(module._parameters for module in model.modules())
        return cast_inside(model, precision, {}, args, kwargs)

    def after(*_: Any) -> None:
        for module, parameters in zip(model.modules(), kept, strict=True):
            module.__dict__["_parameters"] = parameters
        kept.clear()

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    )

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


MASTER = "master"  # slot of an optimizer's state
_O = TypeVar("_O", bound=torch.optim.Optimizer)


def with_masters(optimizer: _O) -> _O:
    """Let an optimizer of torch's keep a float32 copy of each narrower parameter, and update that.

    Its states are float32, too; after each step the parameter is its copy, rounded. The copy is made of the
    parameter at the first step, and is among the optimizer's state as ``"master"``, saved and loaded with it.

    Args:
        optimizer: of parameters whose gradients are float32, as `placement.apply` gives them for ``"master"``, or as
            narrow as they are.

    Returns:
        The same optimizer.

    Raises:
        MismatchError: none of its parameters is narrower.
    """
    if not any(map(is_narrow, _parameters(optimizer))):
        raise MismatchError(
            f"the parameters of this {type(optimizer).__name__} are none narrower than float32, of which copies would "
            "be kept; use it as it is, or capture the model with precision='master'."
        )
    masters = _Masters(optimizer)
    optimizer.register_step_pre_hook(lambda *_: masters.begin())
    optimizer.register_step_post_hook(lambda *_: masters.end())
    # Torch gives what it loads the formats of the parameters.
    optimizer.register_load_state_dict_pre_hook(lambda *_: masters.begin())
    optimizer.register_load_state_dict_post_hook(lambda *_: masters.end(are_loaded=True))
    return optimizer


class _Masters:
    """Puts the copies in the place of the parameters, and back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._narrow: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def begin(self) -> None:
        """Let parameters be their copies."""
        for parameter in filter(is_narrow, _parameters(self._optimizer)):
            gradient = parameter.grad
            has_narrow = gradient is not None and is_narrow(gradient)
            self._narrow[parameter] = parameter.data, gradient if has_narrow else None
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if has_narrow:
                parameter.grad = None  # of another format than the copy
            parameter.data = state.pop(MASTER) if MASTER in state else parameter.data.float()
            if has_narrow:
                assert gradient is not None
                parameter.grad_dtype = torch.float32
                parameter.grad = gradient.float()

    def end(self, are_loaded: bool = False) -> None:
        """Let them be what they were, of the copies' values; copies that were loaded stay those."""
        for parameter, (narrow, gradient) in self._narrow.items():
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if not are_loaded and (state or parameter.grad is not None):  # it has been updated
                state = self._optimizer.state[parameter]
                state[MASTER] = parameter.data
            if MASTER in state:
                narrow.copy_(state[MASTER])
            if gradient is not None:
                parameter.grad = None
            parameter.data = narrow
            if gradient is not None:
                parameter.grad_dtype = gradient.dtype
                parameter.grad = gradient
        self._narrow.clear()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def is_narrow(parameter: torch.Tensor) -> bool:
    """True if its numbers are floating-point ones narrower than float32."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize


def add_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Add gradients to ``grad`` of the parameters of those names."""
    places = {gradient.device for gradient in gradients.values() if gradient.is_cuda}
    gradients = {name: _accepted(model.get_parameter(name), gradient) for name, gradient in gradients.items()}
    if any(not gradient.is_cuda for gradient in gradients.values()):
        for place in places:  # copies to the host are on their way
            torch.cuda.current_stream(place).synchronize()
    counts: dict[int, int] = {}
    for gradient in gradients.values():
        if gradient.layout is torch.strided:
            memory = gradient.untyped_storage().data_ptr()
            counts[memory] = counts.get(memory, 0) + 1
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad += gradient
            continue
        if gradient.layout is not torch.strided:
            parameter.grad = gradient
            continue
        storage = gradient.untyped_storage()
        is_alone = counts[storage.data_ptr()] == 1 and storage.nbytes() == gradient.nbytes
        # As autograd: the gradient itself where nothing else is in its memory, and strides like the parameter's.
        if is_alone and gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _accepted(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient where its parameter is, in the format in which that takes one; replicas may add up a narrower one."""
    dtype = gradient_format(parameter) or gradient.dtype
    if gradient.is_cuda and parameter.device.type == "cpu" and gradient.layout is torch.strided:
        memory = torch.empty_like(gradient, dtype=dtype, device="cpu", pin_memory=True)
        return memory.copy_(gradient, non_blocking=True)
    return gradient.to(parameter.device, dtype)


OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
}


def optimizer_of(model: torch.nn.Module, name: str, **settings: Any) -> Any:
    """The optimizer of a model's trained parameters; None where it has none here.

    A model under a strategy makes its own, which keeps its state where the strategy says.

    Args:
        model: plain, or this process's share.
        name: as in `OPTIMIZERS`.
        settings: of it.
    """
    kind, own = OPTIMIZERS[name]
    make = getattr(type(model), "optimizer", None)
    if make is not None:
        return make(model, kind, **own, **settings)
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(trained, **own, **settings) if trained else None
