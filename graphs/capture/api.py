"""From a PyTorch model to an `OpGraph`, without allocating its weights.

Inference goes through ``torch.export``; training through one recorded run of forward, loss and backward on fake
tensors, with one update op per parameter. See docs/capture.md for what is counted and what is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture.again import again, draws, watched
from graphs.capture.casting import kept_formats
from graphs.capture.emit import emit
from graphs.capture.export import trace_inference, trace_of
from graphs.capture.failure import TO_MODULES, Untraceable, capture_failure
from graphs.capture.fake import Faker, borrowed
from graphs.capture.lower import lower, optimizer_named
from graphs.capture.modules import capture_modules
from graphs.capture.on_cuda import as_untraced, quiet_loggers
from graphs.capture.program import Program, program_of, with_step
from graphs.capture.record import Loss, argument_leaves, trace_forward, trace_training
from graphs.capture.rows import add_rows
from graphs.capture.trace import Trace, flat
from graphs.errors import CaptureError, PlacementError, UnknownNameError
from graphs.kept import precision_named
from graphs.opgraph import OpGraph, Origin
from graphs.origin import ModelCall
from graphs.recipes import FLOAT8, OPTIMIZERS, Optimizer, Precision

GRANULARITIES = ("op", "module", "auto")
_WAY_OUT = (
    "make what changes a buffer that is written in place, or a tensor among forward's arguments, and draw from a "
    "torch.Generator instead of seeding"
)
_SUM = 2  # of torch's enumeration of reductions


def capture(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    *,
    granularity: str = "op",
    loss: Loss | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    name: str | None = None,
    is_compiled: bool = False,
) -> OpGraph:
    """The graph of one inference (in evaluation mode) or one training step (in training mode) of a model.

    The model is not changed, its weights are neither copied nor computed with, and they may be on ``meta``.

    Args:
        model: any module.
        args: positional example inputs; their shapes are the shapes captured. A single tensor stands for ``(tensor,)``.
        kwargs: keyword example inputs.
        train: forward, backward and update instead of forward alone.
        granularity: ``"op"``, or ``"module"`` for one op per call of a leaf module: coarser, with an estimated backward
            pass, but it needs no tracing. ``"auto"``: by op, and by module, with a warning, what cannot be traced.
        loss: function from the model's output to a scalar; by default a scalar output, the output's ``loss``,
            or the sum of the means of all floating-point outputs.
        optimizer: ``"adam"``, ``"adamw"``, ``"momentum"`` or ``"sgd"``: what is kept and moved per parameter.
        precision: number formats that the model is to be trained in, as in `graphs.recipes.PRECISIONS`; None: those
            that it has.
        name: of the graph; by default the model's class.
        is_compiled: the step is to run under torch.compile, for which transformers makes masks that it leaves out of an
            eager one (`graphs.capture.on_cuda`); the stack itself is put on by `graphs.transforms.on_stack`.

    Raises:
        CaptureError: the model cannot be traced; the message names the module and the line.
        UnknownNameError: no such granularity, optimizer or precision.
    """
    if granularity not in GRANULARITIES:
        raise UnknownNameError("granularity", granularity, GRANULARITIES)
    product = "" if precision is None else precision_named(precision).product
    if precision is not None and granularity == "module":
        raise CaptureError(
            f"precision {precision!r:.60} makes casts of single ops, and with granularity='module' there are none; "
            "leave the granularity out, or convert the model before."
        )
    if precision is not None and product:
        from graphs.transforms.float8 import with_float8_products

        own: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "name": name, "is_compiled": is_compiled}
        base = capture(model, args, kwargs, train, precision=precision.removesuffix(FLOAT8), **own)
        return with_float8_products(base, precision)
    if granularity != "module":
        try:
            how: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "name": name}
            program = capture_program(model, args, kwargs, train, loss=loss, **how, is_compiled=is_compiled)
            return with_step(program, ModelCall(unwrapped(model), *example_inputs(args, kwargs), loss))
        except CaptureError as error:
            if granularity == "op" or error.way_out != TO_MODULES or precision is not None:
                raise
            warnings.warn(f"{error.reason}; each leaf module is one op instead.", stacklevel=2)
    model, positional, keywords = _checked(model, args, kwargs, loss)
    with quiet_loggers(), _disable_current_modes():  # the caller's own fake tensor mode, say
        title = name or type(model).__name__
        chosen = optimizer_named(optimizer)
        origin = _origin(train, "module", chosen, positional, keywords)
        return capture_modules(model, positional, keywords, train, chosen, title, origin)


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    *,
    loss: Loss | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    name: str | None = None,
    is_compiled: bool = False,
) -> Program:
    """As `capture` at op granularity, with the traced step that the graph was made of, so that it can be run.

    Raises:
        CaptureError, UnknownNameError: as `capture`.
    """
    chosen, formats = optimizer_named(optimizer), None if precision is None else precision_named(precision)
    model, positional, keywords = _checked(model, args, kwargs, loss)
    with quiet_loggers(), _disable_current_modes():
        converted = None if formats is None else kept_formats(model, formats)
        fake = Faker(FakeTensorMode(allow_non_fake_inputs=True), converted)
        trace, said = _trace(model, positional, keywords, train, loss, fake, formats, is_compiled)
        drafts = lower(trace, chosen, formats)
        add_rows(drafts)
        origin = replace(_origin(train, "op", chosen, positional, keywords), summed_loss=_summed_loss(trace))
        origin = replace(origin, precision=precision)
        graph = emit(drafts, name or type(model).__name__, origin)
    if said:
        warnings.warn(f"{said}; what is captured is one step: {_WAY_OUT}", stacklevel=2)
    leaves = argument_leaves(model, positional, keywords)
    settings = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
    return program_of(trace, drafts, graph, train, fake.originals(), settings)


def from_exported_program(program: ExportedProgram, name: str = "exported") -> OpGraph:
    """The graph of one run of an exported program.

    Raises:
        CaptureError: a size depends on data, nothing is computed, or an operator is made of too many calls.
    """
    return emit(lower(trace_of(program), OPTIMIZERS["sgd"]), name, Origin("pt2", train=False, granularity="op"))


def example_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call, as they are given beside a model.

    Raises:
        CaptureError: these are none.
    """
    if not isinstance(args, (torch.Tensor, tuple, list)):
        raise CaptureError(
            f"the example inputs are a {type(args).__name__}; expected a tuple of the positional arguments, or one "
            "tensor; keyword arguments come after it, as a mapping."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"the keyword arguments are a {type(kwargs).__name__}; expected a mapping from their names to their values."
        )
    return (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})


def unwrapped(model: Any) -> Any:
    """The model inside of what torch.compile and DistributedDataParallel put around it.

    Raises:
        CaptureError: fully_shard or FSDP has cut its parameters.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            names = {kind.__name__ for kind in type(module).__mro__}
            cut = [type(p).__name__ for p in module.parameters(recurse=False) if type(p).__name__ == "DTensor"]
            if names & {"FSDPModule", "FullyShardedDataParallel"} or cut:
                where = f"module {path!r}" if path else type(model).__name__
                raise CaptureError(
                    f"the parameters of {where} are cut over processes already (fully_shard, FSDP or DTensor); capture "
                    "the model before that: a strategy says how it is cut."
                )
    return model


def _checked(
    model: nn.Module, args: Any, kwargs: Any, loss: Loss | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module that is meant, its positional and its keyword arguments."""
    if loss is not None and not callable(loss):
        raise CaptureError(f"got loss={loss!r:.60}; expected a function from the model's output to a scalar tensor.")
    model = unwrapped(model)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"got a {type(model).__name__}; expected a torch.nn.Module with Python code, pass the original module."
        )
    return model, *example_inputs(args, kwargs)


def _origin(
    train: bool, granularity: str, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Origin:
    """Origin of a captured graph; the batch is the first dimension that all input tensors share."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    first = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    samples = first.pop() if len(first) == 1 else 0
    return Origin("capture", train, granularity, optimizer.name if train else None, samples or None)


def _summed_loss(trace: Trace) -> str | None:
    """The kind of the first loss that adds its samples up; None where there is none."""
    for node in trace.graph.nodes:
        if isinstance(node.target, OpOverload):
            names = [argument.name for argument in node.target._schema.arguments]
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if given.get("reduction") == _SUM and "backward" not in str(node.target):
                return str(node.target).removesuffix(".default")
    return None


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    train: bool,
    loss: Loss | None,
    fake: Faker,
    precision: Precision | None,
    is_compiled: bool,
) -> tuple[Trace, str]:
    """The trace, and what `again` says of it."""
    fake_args, fake_kwargs = fake.arguments(args), fake.arguments(kwargs)
    is_lost = True
    try:
        with as_untraced(is_compiled, fake_args, fake_kwargs), borrowed(model, train, fake):
            if train:
                with fake.mode:
                    return again(model, lambda: trace_training(model, fake_args, fake_kwargs, loss, precision))
            if precision is not None:  # casts are made while the model runs, which torch.export does not follow
                with fake.mode:
                    return again(model, lambda: trace_forward(model, fake_args, fake_kwargs, precision=precision))
            exported, changed = watched(model, lambda: trace_inference(model, fake_args, fake_kwargs))
            if not (is_lost := _lost(exported, fake)) and not changed and not any(map(draws, exported.graph.nodes)):
                return exported, ""
            error: Exception = RuntimeError("torch.export loses a tensor that the model makes, or a seed")
    except PlacementError:
        raise
    except Exception as raised:
        failure = capture_failure(model, raised, TO_MODULES)
        if train or failure.way_out != TO_MODULES:
            raise failure from raised
        error = raised
    try:
        # The recorder stands lower than torch.export, which does not see through torch.func and ``.data``.
        with borrowed(model, train, fake), fake.mode:
            trace, said = again(model, lambda: trace_forward(model, fake_args, fake_kwargs))
        is_as_exported = not is_lost and not trace.unlike and not any(map(draws, trace.graph.nodes))
        return (exported if is_as_exported else trace), said
    except Exception as raised:
        if not is_lost:
            return exported, ""
        raise capture_failure(model, raised if isinstance(raised, Untraceable) else error, TO_MODULES) from error


def _lost(trace: Trace, fake: Faker) -> bool:
    """Whether torch.export takes a tensor that the model makes for a constant, or a batch of ``vmap`` for a sample."""
    tensors = [state.tensor for state in trace.states.values() if isinstance(state.tensor, FakeTensor)]
    known = fake.originals()
    if any(node.op == "placeholder" for _, node in trace.writes):  # a buffer has become another one
        return True
    if any(id(tensor) not in known and tensor.constant is None for tensor in tensors):
        return True
    values = (leaf for node in trace.graph.nodes for leaf in flat(node.meta.get("val")))
    return any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in values)
