"""`Configuration`: how a training tool is told to run a model, in words that all tools share; `Format`: its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from graphs.errors import ConfigurationError, UnknownNameError
from graphs.formatting import show

NONE, FULL, ATTENTION, OPS = "none", "full", "attention", "ops"
EVERY, FIRST = "every ", "first "  # before a number of layers
UPDATES_LATE = (
    "updates on hosts are predicted beside the backward pass, and tools make them after it: the step may be longer by "
    "what they take"
)
LAYERS_PER_STAGE = "layers of a stage"  # a key of `Configuration.sizes`


@dataclass(frozen=True)
class Configuration:
    """All that a configuration says of time and memory, and the rest of it as it stands.

    Attributes:
        tool: a name of `placement.configurations.registry.TOOLS`.
        devices: the world size; None where the file does not say.
        groups: replicas of a whole model, each cut over `shards` devices (hybrid sharding); 1 for none.
        shards: replicas in a group; None for as many as there are devices left.
        zero: level at which storage is cut over `shards`, and along `context`; 0 for none.
        tensor: degree of tensor parallelism.
        sequence_parallel: whether what it leaves whole is cut along the sequence.
        context: degree of context parallelism.
        context_by: how attention gets what it needs: ``""`` gathers, ``"ring"``, ``"ulysses"``.
        experts: degree of expert parallelism, on devices of the replicas, and of `tensor` with `has_whole_experts`.
        has_whole_experts: tensor parallelism spreads experts, and does not cut their weights.
        once_a_host: a token is sent to a host once, however many of its experts are there.
        stages: of the pipeline.
        order: of its micro-batches, a name of `graphs.transforms.strategy.ORDERS`.
        chunks: stages of each device.
        edge_layers: layers by which the first and the last stage are shorter; None: stages take equally long.
        micro_batch: samples that one replica takes at a time; None where the file does not say.
        accumulation: micro-batches of a replica in one step; None where it follows from `batch`, or is 1.
        batch: samples of all replicas in one step; None where it follows, or the file does not say.
        sequence: words of a sample; None where the file does not say.
        precision: one of `graphs.recipes.PRECISIONS`; None where the file does not say.
        is_float16: whether its narrow format is float16, not bfloat16.
        stack: how ops become kernels, one of `graphs.origin.STACKS`.
        optimizer: as in `graphs.recipes.OPTIMIZERS`; None where the file does not say.
        recompute: `NONE`, `FULL`, `ATTENTION`, `OPS` (of each layer all but every other product), ``"every 2"`` layers,
            the ``"first 4"`` layers of each stage, or patterns as in `Strategy.recompute`, joined by ``+``.
        offload: what lives in the memory of hosts, as in `graphs.transforms.strategy.OFFLOADED`.
        bucket_bytes: of gradients that are reduced together; None for the default of a strategy.
        overlaps: whether gradients are reduced beside the backward pass, and not after it.
        sizes: of the model, by names of the tool, as far as the file has them.
        others: keys of no consequence, and those whose value is left to the tool, as they stand in the file.
        notes: sentences on what the tool does otherwise than it is predicted.
        lines: the line of the file on which each key stands.
    """

    tool: str
    devices: int | None = None
    groups: int = 1
    shards: int | None = None
    zero: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    context_by: str = ""
    experts: int = 1
    has_whole_experts: bool = False
    once_a_host: bool = False
    stages: int = 1
    order: str = "1f1b"
    chunks: int = 1
    edge_layers: tuple[int, int] | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    is_float16: bool = False
    stack: str = "eager"
    optimizer: str | None = None
    recompute: str = NONE
    offload: tuple[str, ...] = ()
    bucket_bytes: int | None = None
    overlaps: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_parallel(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.context * self.stages

    @property
    def replicas(self) -> int | None:
        """Replicas of all groups; None where that is for the number of devices to say."""
        return None if self.shards is None else self.groups * self.shards

    def at(self, *keys: str) -> str:
        """``line 7: `` of the first key that stands in the file; empty where none does."""
        return next((f"line {self.lines[key]}: " for key in keys if key in self.lines), "")

    def on(self, devices: int) -> Configuration:
        """The same with all degrees known.

        Args:
            devices: of the cluster, which has at least as many as the file says.

        Raises:
            ConfigurationError: degrees that do not multiply to the number of devices.
        """
        world = self.devices or devices
        if world > devices:
            raise ConfigurationError(
                f"{self.at(*WORLD_KEYS)}the configuration is for {world} devices, and the cluster has {devices}; give "
                "a cluster of as many."
            )
        each = self.model_parallel * self.groups
        if self.shards is None:
            if world % each:
                raise ConfigurationError(
                    f"{self.at(*DEGREE_KEYS)}tensor {self.tensor} x context {self.context} x pipeline {self.stages} x "
                    f"replicas of groups {self.groups} = {each}, which does not divide {world} devices."
                )
            shards = world // each
        else:
            shards = self.shards
            asked = each * shards
            if asked > devices or (self.devices is not None and asked != self.devices):
                raise ConfigurationError(
                    f"{self.at(*DEGREE_KEYS)}the degrees multiply to {asked} devices (tensor {self.tensor} x context "
                    f"{self.context} x pipeline {self.stages} x data {self.groups * shards}), and there are {world}."
                )
            world = asked
        zero = self.zero if shards * self.context > 1 else 0
        return replace(self, devices=world, shards=shards, zero=zero)


WORLD_KEYS = ("num_processes", "--nproc-per-node", "--nnodes", "--world-size", "parallelism.data_parallel_shard_degree")
DEGREE_KEYS = (
    *("parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"),
    *("parallelism.context_parallel_degree", "parallelism.data_parallel_shard_degree"),
    *("parallelism.data_parallel_replicate_degree", "--tensor-model-parallel-size"),
    *("--pipeline-model-parallel-size", "--context-parallel-size", "parallelism_config.parallelism_config_tp_size"),
    *("parallelism_config.parallelism_config_dp_shard_size", "num_processes"),
)


READ, INERT, ONLY = "read", "inert", "only"
LARGEST_NUMBER = 1e15  # beyond, no count or rate of a run
_NEAR = 0.85  # of 1, that an unknown key is like a known one for which it may be meant
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        use: `READ`: understood; `INERT`: changes neither time nor memory; `ONLY`: understood at some values alone.
        kind: of its value, a Python type; of `READ` alone.
        default: what the tool takes where the key is missing.
        values: of `ONLY`, and of `READ` where not every value of the kind is one: those that are taken.
        why: of `ONLY`: what any other value would do that is not predicted.
        may_be_auto: whether ``"auto"`` leaves the value to the tool.
        field: of `Configuration` that it says; "": it takes more than one value to tell.
        words: of a field in other words, by the tool's.
    """

    use: str
    kind: type = str
    default: Any = None
    values: tuple[Any, ...] = ()
    why: str = ""
    may_be_auto: bool = False
    field: str = ""
    words: Mapping[Any, Any] | None = None


def read(kind: type, default: Any = None, *values: Any, auto: bool = False, field: str = "") -> Key:
    """A key that is understood, and the field of a `Configuration` that it says by itself."""
    return Key(READ, kind, default, values, may_be_auto=auto, field=field)


def words(field: str, default: Any, of: Mapping[Any, Any]) -> Key:
    """A key that says a field of a `Configuration` in words of the tool's own."""
    return Key(READ, type(next(iter(of))), default, tuple(of), field=field, words=of)


def only(*values: Any, why: str) -> Key:
    """A key that is understood at some values alone, of which the first is the default."""
    return Key(ONLY, default=values[0], values=values, why=why)


def refused(why: str) -> Key:
    """A key that is known, and understood at no value."""
    return Key(ONLY, why=why)


inert = Key(INERT)


def inert_keys(names: str, before: str = "") -> dict[str, Key]:
    """Keys that change neither time nor memory.

    Args:
        names: with spaces between them.
        before: what each of them begins with.
    """
    return {f"{before}{name}": inert for name in names.split()}


@dataclass(frozen=True)
class Format:
    """Keys of one tool.

    Attributes:
        label: the tool, as sentences name it.
        version: of the documentation or the source that the keys were taken from.
        keys: by name; ``"section.*"`` is all keys that begin so and are not named.
    """

    label: str
    version: str
    keys: Mapping[str, Key]

    def key(self, name: str) -> Key | None:
        """The key of a name; None for an unknown one."""
        if name in self.keys:
            return self.keys[name]
        begun = (each for each in self.keys if each.endswith("*") and name.startswith(each[:-1]))
        longest = max(begun, key=len, default=None)
        return None if longest is None else self.keys[longest]

    def told(self, found: Configuration, before: str = "") -> dict[str, Any]:
        """Values of keys that begin with `before` and say a field by themselves, as `FileValues.fields` reads them."""
        given = {}
        for name, key in self.keys.items():
            if key.field and name.startswith(before):
                value = getattr(found, key.field)
                own = value if key.words is None else next((each for each, v in key.words.items() if v == value), None)
                given[name] = own
        return given

    def values(self, entries: Mapping[str, tuple[Any, int]]) -> FileValues:
        """The values of a file.

        Args:
            entries: by key, the value and its line.

        Raises:
            ConfigurationError: a key that is unknown, a value of another kind, or one that is not understood.
        """
        given: dict[str, Any] = {}
        others: dict[str, Any] = {}
        if unknown := {name: line for name, (_, line) in entries.items() if self.key(name) is None}:
            raise ConfigurationError(self._unknown(unknown))
        for name, (value, line) in entries.items():
            key = self.key(name) or inert
            if key.use == INERT or (key.may_be_auto and value == "auto"):
                others[name] = value
            elif key.use == ONLY:
                if not any(_same(value, each) for each in key.values):
                    raise ConfigurationError(
                        f"line {line}: {name} = {shown(value)} is not predicted: {key.why}; "
                        f"{f'expected {one_of(map(shown, key.values))}' if key.values else 'leave it out'}."
                    )
                others[name] = value
            else:
                given[name] = _of_kind(self.label, key, name, value, line)
        return FileValues(self, given, others, {name: line for name, (_, line) in entries.items()})

    def _unknown(self, lines: Mapping[str, int]) -> str:
        """A sentence about all keys that are unknown, by their lines; only a near name is offered for one."""
        name, line = next(iter(lines.items()))
        known = get_close_matches(name, [each for each in self.keys if not each.endswith("*")], 1, _NEAR)
        more = ", ".join(f"{each!r} on line {at}" for each, at in lines.items() if each != name)
        listed = f"{f'Unknown, too: {more}. ' if more else ''}Known: {self.version}"
        return f"line {line}: {UnknownNameError(f'key of {self.label}', name, known, listed)}"


@dataclass(frozen=True)
class FileValues:
    """A file whose keys are all known.

    Attributes:
        format: of the tool.
        given: values of the keys that are understood, by name.
        others: of all else.
        lines: of all keys.
    """

    format: Format
    given: Mapping[str, Any]
    others: Mapping[str, Any]
    lines: Mapping[str, int]

    def __getitem__(self, name: str) -> Any:
        """A value, or the tool's default."""
        return self.given.get(name, self.format.keys[name].default)

    def fields(self, before: str = "") -> dict[str, Any]:
        """Fields of a `Configuration` that keys say by themselves, of keys that begin with `before`."""
        own = {name: key for name, key in self.format.keys.items() if key.field and name.startswith(before)}
        return {key.field: self[name] if key.words is None else key.words.get(self[name]) for name, key in own.items()}

    def error(self, sentence: str, *names: str) -> ConfigurationError:
        """An error on the line of the first of the names that stands in the file."""
        line = next((f"line {self.lines[name]}: " for name in names if name in self.lines), "")
        return ConfigurationError(f"{line}{sentence}")

    def at_least(self, name: str, least: int = 1) -> Any:
        """A number, or the tool's default.

        Raises:
            ConfigurationError: it is smaller.
        """
        value = self[name]
        if value is not None and value < least:
            raise self.error(f"{name} = {value}; expected {least} or more.", name)
        return value


def said(
    found: Format, given: Mapping[str, Any], others: Mapping[str, Any], always: Sequence[str] = ()
) -> dict[str, Any]:
    """All that a file needs, in the order of the format.

    That is values that are not the tool's defaults, those of `always`, and the other keys as they stood.
    """
    told = {
        name: value
        for name, value in given.items()
        if value is not None and (name in always or value != found.keys[name].default)
    }
    places = {name: place for place, name in enumerate(found.keys)}
    everything = {**others, **told}
    return {
        name: everything[name] for name in sorted(everything, key=lambda name: (places.get(name, len(places)), name))
    }


def shown(value: Any) -> str:
    """A value as configurations write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return show(value or '""') if isinstance(value, str) else str(value)


def one_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _same(value: Any, other: Any) -> bool:
    """Whether values are one, where a number may stand for another kind of number, but for no truth value."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _of_kind(label: str, key: Key, name: str, value: Any, line: int) -> Any:
    if isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER:
        raise ConfigurationError(f"line {line}: {name} of {label} is no number below {LARGEST_NUMBER:g}.")
    is_whole = isinstance(value, float) and value.is_integer() and key.kind is int  # 5e8, as JSON writes it
    value = int(value) if is_whole else value
    kinds = (int, float) if key.kind is float else key.kind
    is_right = isinstance(value, kinds) and isinstance(value, bool) == (key.kind is bool)
    if value is not None and not is_right:
        raise ConfigurationError(f"line {line}: {name} = {shown(value)} of {label}; expected {_WORDS[key.kind]}.")
    if key.values and value is not None and not any(_same(value, each) for each in key.values):
        raise ConfigurationError(
            f"line {line}: {name} = {shown(value)} is not predicted; expected {one_of(map(shown, key.values))}."
        )
    return value
