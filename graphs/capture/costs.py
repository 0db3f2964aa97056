"""FLOPs, kernels and aliasing of one traced call, by torch's own counters.

A call that torch has a FLOP formula for is counted by it. A composite call (``linear``, ``matmul``, ``lstm``) is run
once on fake tensors of its shapes and the calls it makes are counted, up to a limit. Both are cached by target and
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.failure import TO_MODULES
from graphs.capture.on_cuda import cuda_choices
from graphs.capture.trace import Layout, flat, layouts, tensor_info
from graphs.errors import CaptureError
from graphs.ops.table import NO_FACTS, OUTPUT, Arguments, WorkFacts, attention_extents, operator
from graphs.records import Work

aten = torch.ops.aten

MOST_CALLS = 300_000  # that composite calls of one graph may be made of: about a minute
# Calls whose mask is a program, so that nobody knows what it leaves out.
_FLEXIBLE = {"flex_attention": Work.ATTENTION, "flex_attention_backward": Work.ATTENTION_BACKWARD}
_calls: ContextVar[Iterator[int]] = ContextVar("_calls")  # numbers those of the graph at hand
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
_GATHERS = {"embedding", "index_select", "index", "gather", "take", "take_along_dim", "embedding_bag"}
_SCATTERS = {"index_put_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "masked_scatter_"}
_STATISTICS = {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "instance_norm"}
_TRAINING = {"native_batch_norm": 5, "native_batch_norm_backward": 7}  # position of the flag
_IN_PLACE_VIEWS: dict[OpOverload, OpOverload] = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.swapaxes_.default: aten.swapaxes.default,
    aten.swapdims_.default: aten.swapdims.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
_IDENTITIES = {"lift_fresh_copy", "lift_fresh", "alias", "detach", "_unsafe_view"}


class Signature(NamedTuple):
    """WorkFacts from the schema of a target.

    Attributes:
        name: e.g. ``"conv2d"``.
        kind: e.g. ``"aten.conv2d"``.
        writes: (position, name) of the arguments it writes in place.
        returned: for each output, which of ``writes`` it is, or None.
        may_alias: some output may share memory with an argument it does not write.
        parts: its outputs are a list of views of its first argument, e.g. of ``split`` and ``unbind``.
        composite: it only calls other operators.
        uninitialised: it allocates without computing.
        overwrites: the argument written in place is not read.
        gathers: it reads no more of its table than it writes.
        scatters: it writes no more of its table than it reads from the other arguments.
        identity: it returns its argument.
        statistics: it keeps running statistics in its buffers, though its schema does not say so.
    """

    name: str
    kind: str
    writes: tuple[tuple[int, str], ...] = ()
    returned: tuple[int | None, ...] = ()
    may_alias: bool = False
    parts: bool = False
    composite: bool = False
    uninitialised: bool = False
    overwrites: bool = False
    gathers: bool = False
    scatters: bool = False
    identity: bool = False
    statistics: bool = False

    def written_by(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the arguments that a call of the target writes in place."""
        found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in self.writes]
        return [leaf for leaf in flat(found) if isinstance(leaf, fx.Node)]

    def statistics_of(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the running mean and variance that a call updates, though its schema does not say so."""
        if not self.statistics or not node.args[5]:  # training, or use_input_stats
            return []
        return [argument for argument in node.args[3:5] if isinstance(argument, fx.Node)]

    def kind_of(self, node: fx.Node) -> str:
        """Kind of a call of the target: a norm in evaluation mode, of constant statistics, has one of its own."""
        is_constant = self.name in _TRAINING and not node.args[_TRAINING[self.name]]
        return self.kind.replace("native_batch_norm", "_native_batch_norm_legit_no_training", is_constant)


class Cost(NamedTuple):
    """Cost of one call; ``aliases[i]`` is the tensor argument whose memory output i shares, or None."""

    flops: float = 0.0
    kernels: int = 1
    aliases: tuple[int | None, ...] = ()
    facts: WorkFacts = NO_FACTS


@cache
def signature(target: Any) -> Signature:
    """Read a call target's schema once."""
    if not isinstance(target, OpOverload):
        name = str(getattr(target, "__name__", target))
        return Signature(name, f"higher_order.{name}" if isinstance(target, torch._ops.HigherOrderOperator) else name)
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    outputs = [out.alias_info for out in schema.returns]
    identity = name in _IDENTITIES
    written = [] if identity else schema.arguments
    aliased = [(i, arg.name, arg.alias_info) for i, arg in enumerate(written) if arg.alias_info]
    writes = [(i, arg, alias.before_set) for i, arg, alias in aliased if alias.is_write]
    sets = [before for _, _, before in writes]
    return Signature(
        name=name,
        kind=f"{namespace}.{name}",
        writes=tuple((i, arg) for i, arg, _ in writes),
        returned=tuple(
            sets.index(alias.before_set) if alias is not None and alias.before_set in sets else None
            for alias in outputs
        ),
        may_alias=any(alias is not None and not alias.is_write for alias in outputs),
        parts=[(str(out.type), not out.alias_info.is_write) for out in schema.returns if out.alias_info]
        == [("List[Tensor]", True)],
        composite=namespace != "prim"
        and name != "_fused_rms_norm"  # but on the CPU
        and torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd"),
        uninitialised=name in _UNINITIALISED,
        overwrites=name in _OVERWRITES,
        gathers=name in _GATHERS,
        scatters=name in _SCATTERS,
        identity=identity,
        statistics=name in _STATISTICS,
    )


def out_of_place(target: Any) -> Any:
    """The operator that makes the view into which a target turns its argument (``transpose_``); any other as it is."""
    return _IN_PLACE_VIEWS.get(target, target)


def shows_other_memory(target: Any) -> bool:
    """Whether a target makes its argument a tensor of other memory, or of more or less of its own (``set_``)."""
    return torch.Tag.inplace_view in getattr(target, "tags", ()) and target not in _IN_PLACE_VIEWS


def cost(target: Any, args: Any, kwargs: Any, output: Any) -> Cost:
    """Cost of one call whose tensors are given as `Layout` (sequences as tuples, so that calls can be cached)."""
    if not isinstance(target, OpOverload):
        return Cost(facts=facts_of(target, args, kwargs, output))
    facts = signature(target)
    if facts.parts:  # not tried out: how many parts it makes is for an argument or a size to say
        return Cost(aliases=(0,) * len(flat(output)))
    try:
        if facts.composite or facts.may_alias:
            return _probed(target, args, kwargs)
        if _formula(target) is None:
            return Cost(facts=facts_of(target, args, kwargs, output))
        return _by_formula(target, args, kwargs, output)
    except TypeError as error:  # an argument that cannot be a cache key, e.g. a random generator
        if "unhashable" not in str(error):
            raise
        return Cost()


@contextmanager
def limited_calls() -> Iterator[None]:
    """While the block runs, composite calls may be made of `MOST_CALLS` in all; what is cached does not count."""
    token = _calls.set(count(1))
    try:
        yield
    finally:
        _calls.reset(token)


def subgraph_flops(subgraph: fx.GraphModule) -> float:
    """FLOPs of a branch or loop body, once."""
    calls = [node for node in subgraph.graph.nodes if node.op == "call_function"]
    return sum(cost(n.target, layouts(n.args), layouts(n.kwargs), layouts(n)).flops for n in calls)


def _formula(target: OpOverload) -> Callable[..., int] | None:
    own = operator(target._schema.name.partition("::")[2]).flops
    return own or flop_counter.flop_registry.get(target._overloadpacket)


@lru_cache(maxsize=16384)
def _by_formula(target: OpOverload, args: Any, kwargs: Any, output: Any) -> Cost:
    formula = _formula(target)
    assert formula is not None
    flops = formula(*_tensors(args, "meta"), **dict(_tensors(kwargs, "meta")), out_val=_tensors(output, "meta"))
    return Cost(float(flops), facts=facts_of(target, args, kwargs, output))


@contextmanager
def general_kernels() -> Iterator[None]:
    """Keep models off oneDNN's recurrent layer and the attention module's fast path, which have no FLOP formula.

    Where kernels depend on the device, they are those of CUDA.
    """
    # Not torch.backends.mkldnn.flags: it also touches settings that warn on builds without Intel GPUs.
    mkldnn, fast_path = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with cuda_choices():
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fast_path)


@lru_cache(maxsize=16384)
def _probed(target: OpOverload, args: Any, kwargs: Any) -> Cost:
    with torch.no_grad(), FakeTensorMode(), general_kernels():
        fake_args, fake_kwargs = _tensors(args), dict(_tensors(kwargs))
        inputs = [tensor_info(tensor).storage for tensor in _leaves((fake_args, tuple(fake_kwargs.values())))]
        with _Counter(target) as counter:
            try:
                output = target(*fake_args, **fake_kwargs)
            except DataDependentOutputException:  # a check of values (istft), up to which it is counted
                output = ()
        storages = [tensor_info(tensor).storage for tensor in _leaves(output)]
    aliases = tuple(inputs.index(storage) if storage in inputs else None for storage in storages)
    facts = facts_of(target, fake_args, fake_kwargs, output)
    if facts is NO_FACTS and len(counter.facts) == 1:
        facts = counter.facts[0]
    return Cost(counter.flops, max(counter.kernels, 1), aliases, facts)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what a composite call is made of.

    Raises:
        CaptureError: too many calls.
    """

    def __init__(self, target: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.kernels = 0.0, 0
        self.facts: list[WorkFacts] = []  # of the calls that have any
        self._target = target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if next(_calls.get()) > MOST_CALLS:
            raise CaptureError(
                f"{signature(self._target).kind} is made of too many calls to be counted; composite operators of a "
                f"graph may be made of {MOST_CALLS:,} in all",
                TO_MODULES,
            )
        output = func(*args, **(kwargs or {}))
        formula = _formula(func)
        if formula is not None:
            self.flops += float(formula(*args, **(kwargs or {}), out_val=output))
            if (found := facts_of(func, args, kwargs or {}, output)) is not NO_FACTS:
                self.facts.append(found)
        facts = signature(func)
        self.kernels += not (facts.may_alias or facts.uninitialised or facts.identity or func.namespace == "prim")
        return output


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _tensors(value: Any, device: str = "cpu") -> Any:
    """The value with a tensor without data for each `Layout`."""
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    if isinstance(value, tuple):
        return tuple(_tensors(item, device) for item in value)
    return value


# -- work ---


def facts_of(target: Any, args: Sequence[Any], kwargs: Any, output: Any) -> WorkFacts:
    """A call's work as one product or attention, or the rows it passes over; `NO_FACTS` of any other call.

    Args:
        target: what is called.
        args, kwargs, output: with `Layout` or tensors; `kwargs` a mapping, or its items.
    """
    if isinstance(target, OpOverload):
        rule = _work_rule(target)
        return NO_FACTS if rule is None else rule({**_bound(target, args, dict(kwargs)), OUTPUT: output})
    work = _FLEXIBLE.get(getattr(target, "__name__", ""))
    if work is None or len(args) < 2:
        return NO_FACTS
    return WorkFacts(work, attention_extents({"query": args[0], "key": args[1]}))


def _bound(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Arguments by name, those not given with their defaults."""
    listed = target._schema.arguments
    given = dict(zip((each.name for each in listed), args, strict=False))
    rest = {each.name: each.default_value for each in listed[len(args) :]}
    return {**rest, **given, **kwargs}


@cache
def _work_rule(target: OpOverload) -> Callable[[Arguments], WorkFacts] | None:
    name = target._schema.name.partition("::")[2]
    return operator(name).work or operator(f"{name}.{target._schema.overload_name}").work
