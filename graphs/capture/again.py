"""What of a recorded run says that the next run may be another one: state of Python, and seeds of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture.failure import Untraceable
from graphs.capture.fake import containers, content_of
from graphs.capture.trace import CONSTANT, TensorInfo, Trace, flat, layouts, tensor_info, value_of
from graphs.opgraph import Phase

if TYPE_CHECKING:
    from graphs.capture.record import Recorder

_NUMBERS = (bool, int, float, complex)
FIRST_DRAW = 1 << 62  # the recorder counts draws from here on, where no model's own seed is
_MOST_DRAWS = 1 << 40


def watched(model: nn.Module, record: Callable[[], Trace]) -> tuple[Trace, list[tuple[str, Any]]]:
    """A recorded run, and the dotted names and values of the attributes of modules that it changes.

    Args:
        record: runs the model.
    """
    before = [(path, _attributes(module)) for path, module in model.named_modules()]
    held = containers(value for _, attributes in before for value in attributes.values())
    changed: list[tuple[str, Any]] = []

    def look(*_: Any) -> None:
        others = {id(each) for each, content in held if not _is_one(content, content_of(each))}
        for (path, old), module in zip(before, model.modules(), strict=True):
            for name, value in _attributes(module).items():
                inside = others and any(id(each) in others for each, _ in containers([value]))
                if inside or not _is_one(old.get(name, old), value):
                    changed.append((f"{path}.{name}" if path else name, value))

    handle = model.register_forward_hook(look)  # before torch.export puts attributes back
    try:
        trace = record()
    finally:
        handle.remove()
    evaluated = frozenset(path for path, module in model.named_modules() if not module.training)
    return replace(trace, evaluated=evaluated), changed


def again(model: nn.Module, record: Callable[[], Trace]) -> tuple[Trace, str]:
    """A recorded run, and a sentence on what the model does in it by which the next may be another; "" for most models.

    Where a run changes attributes of the model's modules, or draws from a generator, it is recorded once more as it
    left the model. Tensors written in place have no part in that, for a graph has them.

    Args:
        record: runs the model, and leaves it as it is then.
    """
    parameters = [(module, module._parameters) for module in model.modules()]
    trace, changed = watched(model, record)
    for module, own in parameters:  # without the casts of a precision
        module.__dict__["_parameters"] = own
    generators = {id(one): one for node in trace.graph.nodes if (one := node.kwargs.get("generator")) is not None}
    is_seeded = any(map(_is_seeded, trace.graph.nodes))
    is_other = False
    if changed or generators:
        try:
            with _disturbed(generators.values()):
                second = record()
            is_other = _rows(trace) != _rows(second) or not _note_states(trace, second)
        except Exception:  # such as a backward pass through what the first run left
            is_other = True
    names = [name for name, value in changed if is_other or isinstance(value, _NUMBERS)]
    reasons = [f"changes its attribute {name!r}" for name in names[:3]]
    reasons += ["seeds torch's random numbers"] if is_seeded else []
    reasons += ["draws from a generator that it seeds anew"] if is_other and generators and not names else []
    said = f"{type(model).__name__} {' and '.join(reasons)} when it runs" if reasons else ""
    return (replace(trace, unlike=said) if is_other or is_seeded else trace), said


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers: one of an operator that may, unless its arguments say that it does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    given |= dict(zip((one.name for one in schema), node.args, strict=False)) | dict(node.kwargs)
    is_off = given.get("train") is False or given.get("training") is False
    return not is_off and not any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout"))


@contextmanager
def _disturbed(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Run a block with generators in states that no model sets them to."""
    saved = [(generator, state_of(generator)) for generator in generators]
    try:
        for generator, _ in saved:
            generator.manual_seed(FIRST_DRAW)
        yield
    finally:
        for generator, state in saved:
            set_state(generator, state)


def state_of(generator: torch.Generator) -> bytes:
    """The state of a generator."""
    with _disable_current_modes():
        return bytes(generator.get_state().numpy())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Put a generator into a state that `state_of` gave."""
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_ALL}


# Also that of transformers, which puts hooks on a model when it first runs.
_OF_ALL = {*vars(nn.Module()), "_output_capturing_hooks_installed"} - {"training"}


def _is_one(old: Any, new: Any) -> bool:
    """Whether two values are the same object, the same number or text, or as long sequences of such."""
    if old is new:
        return True
    if isinstance(old, (*_NUMBERS, str)) and isinstance(new, (*_NUMBERS, str)):
        return bool(old == new)
    if isinstance(old, tuple | list | dict) and type(old) is type(new) and len(old) == len(new):
        pairs = zip(*(each.items() if isinstance(each, dict) else each for each in (old, new)), strict=True)
        return all(_is_one(*pair) for pair in pairs)
    return False


def _is_seeded(node: fx.Node) -> bool:
    """Whether a draw comes after a seed of the model's own."""
    draw = node.meta.get("draw", FIRST_DRAW)
    return node.kwargs.get("generator") is None and not FIRST_DRAW <= draw < FIRST_DRAW + _MOST_DRAWS


def _rows(trace: Trace) -> list[Any]:
    """All that a trace computes, with the content of its constants, to be compared."""
    numbers: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in trace.graph.nodes:
        numbers[node] = len(numbers)
        given = fx.map_arg((node.args, dict(node.kwargs)), lambda source: f"%{numbers[source]}")
        shown = [type(each).__name__ if isinstance(each, torch.Generator) else repr(each) for each in _leaves(given)]
        rows.append((node.op, str(node.target) if node.op == "call_function" else "", shown, repr(layouts(node))))
        state = trace.states.get(node)
        if state is not None and state.kind == CONSTANT:
            rows.append(_numbers(state.tensor))
    rows.append([numbers[node] for node in trace.results])
    rows.append([(numbers[state], numbers[node]) for state, node in trace.gradients])
    return rows


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _numbers(tensor: torch.Tensor | None) -> Any:
    """The bytes of a constant; of one that has none, which tensor it is."""
    known = getattr(tensor, "constant", None)
    if known is None or known.layout is not torch.strided:
        return id(tensor)
    with _disable_current_modes():
        return bytes(known.detach().reshape(-1).view(torch.uint8).numpy())


def _note_states(first: Trace, second: Trace) -> bool:
    """Note at each draw from a generator the state to which the run sets it before; whether both runs set the same.

    A run sets a state where it is none in which the draw before left it, for draws of fakes leave it alone. Before the
    first draw of the second run that is the state of `_disturbed`.
    """
    left: dict[int, bytes] = {}
    undisturbed = state_of(torch.Generator().manual_seed(FIRST_DRAW))
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        if "generator" not in other.meta:
            continue
        now = other.meta["generator"]
        if now != left.get(id(other.kwargs["generator"]), undisturbed):
            one.meta["reset"] = one.meta["generator"]
            if one.meta["reset"] != now:
                return False
        left[id(other.kwargs["generator"])] = now
    return True


def reassigned(recorder: Recorder, model: nn.Module) -> list[tuple[fx.Node, fx.Node]]:
    """Parameters and buffers that the run has given another tensor, or other data, of their shape and type.

    Returns:
        The placeholder of each, and the node of what it has now.
    """
    every = (model.named_parameters, model.named_buffers)
    now = {name: tensor for named in every for name, tensor in named(remove_duplicate=False)}
    found = []
    for placeholder, state in list(recorder.states.items()):
        info = None if state.kind == CONSTANT or state.name not in now else tensor_info(now[state.name])
        if info is None or info == state.info or info.layout[::2] != state.info.layout[::2]:
            continue
        node = recorder.node_of(now[state.name])
        if node.op == "placeholder":  # which may have been given another tensor itself
            raise Untraceable(f"{state.name} becomes another tensor of the model's", "write its numbers by copy_")
        found.append((placeholder, node))
    return found


def write_back(recorder: Recorder, moved: list[tuple[fx.Node, fx.Node]]) -> None:
    """Write to parameters and buffers what the run has given them, as ``copy_`` would.

    That is in the forward pass, unless the backward pass reads what they had.
    """
    nodes = list(recorder.graph.nodes)
    for placeholder, source in moved:
        storage = recorder.states[placeholder].info.storage
        late = [one for one in nodes if one.meta.get("phase") == Phase.BACKWARD]
        reads = [info for one in late for read in one.all_input_nodes for info in flat(value_of(read))]
        is_read = any(isinstance(info, TensorInfo) and info.storage == storage for info in reads)
        last = nodes[-1] if is_read or not late else late[0].prev
        with recorder.graph.inserting_after(last):
            made = recorder.graph.call_function(torch.ops.aten.copy_.default, (placeholder, source))
        made.meta.update(info=placeholder.meta["info"], module=source.meta["module"], call=source.meta.get("call"))
        made.meta["phase"] = Phase.BACKWARD if is_read else Phase.FORWARD
