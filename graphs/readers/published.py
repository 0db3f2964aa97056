"""Readers for two published formats: the NeurIPS 2020 placement problems and the PipeDream profiles.

Sources: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020
(github.com/msr-fiddle/dnn-partitioning); D. Narayanan et al., "PipeDream", SOSP 2019,
doi:10.1145/3341301.3359646 (github.com/msr-fiddle/pipedream).
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphs.disk import read_json, read_text, stem
from graphs.errors import GraphError, GraphFileError
from graphs.opgraph import ANY_DEVICE, Op, OpGraph, Origin, Phase, Tensor
from graphs.recipes import OPTIMIZERS

ACCELERATOR, CPU = "accelerator", "cpu"  # the device kinds of a NeurIPS 2020 problem
Path = str | os.PathLike[str]


@dataclass(frozen=True)
class PublishedDevices:
    """The devices a NeurIPS 2020 file asks for.

    Attributes:
        accelerators: how many accelerators (``maxFPGAs``); ops call their kind ``"accelerator"``.
        cpus: how many CPU cores (``maxCPUs``), kind ``"cpu"``, without a memory limit.
        accelerator_memory_bytes: memory of each accelerator (``maxSizePerFPGA``).
    """

    accelerators: int
    cpus: int
    accelerator_memory_bytes: float


# -- NeurIPS 2020 ---------------------------------------------------------------------------------------------

LARGEST_CLUSTER = 1024  # devices; published problems have at most 22
_DEVICE_KEYS = ("maxFPGAs", "maxCPUs", "maxSizePerFPGA")
_LAYER_KEY = "layerId"  # of the nodes of latency problems only
_OTHER_MODEL = (
    "{where} is a latency problem of NeurIPS 2020; its authors call an accelerator as a whole (all inputs in, all its "
    "ops, all outputs out), here ops and transfers start one by one as soon as they can, so compare no step time with "
    "theirs."
)
_NODE_KEYS = ("id", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode", "size")
_EDGE_KEYS = ("sourceId", "destId", "cost")


def is_neurips_document(document: Any) -> bool:
    """Whether a parsed JSON value looks like a NeurIPS 2020 problem."""
    return isinstance(document, dict) and "nodes" in document and "edges" in document and "schema" not in document


def is_neurips(path: Path) -> bool:
    """Whether a file is a NeurIPS 2020 problem, that is, brings its own devices. False for files that are not JSON."""
    try:
        return is_neurips_document(read_json(path))
    except GraphFileError:
        return False


def read_neurips(path: Path) -> tuple[OpGraph, PublishedDevices]:
    """Read a NeurIPS 2020 problem: the graph, and the devices it is to be placed on.

    Times are keyed by device kind, ``"accelerator"`` and ``"cpu"``; ops that no accelerator supports are pinned to
    ``"cpu"``. ``size`` becomes kept bytes; a colour class of more than one op becomes a colocation group. The cost of
    an op's edges is the time to move its output between an accelerator and host memory: one tensor of 0 bytes (the
    format counts only ``size`` as memory) with that ``transfer_s``. A backward op mirrors the forward op of its
    colour class, if there is exactly one.

    Warns:
        UserWarning: a problem of the paper's latency section, whose model of time is another one (docs/files.md).

    Raises:
        GraphFileError: the file is not such a problem, or breaks a rule of `OpGraph`; the message names the node.
    """
    document, where = read_json(path), os.fspath(path)
    return neurips_graph(document, where), _devices(document, where)


def neurips_graph(document: Any, where: str) -> OpGraph:
    """The graph of a parsed NeurIPS 2020 problem; `where` names the file in errors."""
    if not is_neurips_document(document):
        raise GraphFileError(f"{where} is not a NeurIPS 2020 problem; expected an object with nodes and edges.")
    nodes = {node["id"]: node for node in _entries(document, "nodes", _NODE_KEYS, where)}
    if any(_LAYER_KEY in node for node in nodes.values()):
        warnings.warn(_OTHER_MODEL.format(where=where), stacklevel=2)
    if len(nodes) < len(document["nodes"]):
        twice = Counter(node["id"] for node in document["nodes"]).most_common(1)[0][0]
        raise GraphFileError(f"{where}: node id {twice} appears twice; ids must be unique.")
    names = _names(nodes)
    classes: dict[str, list[int]] = defaultdict(list)
    for number, node in nodes.items():
        if node.get("colorClass") is not None:
            classes[str(node["colorClass"])].append(number)
    ops = [
        _neurips_op(node, nodes, classes.get(str(node.get("colorClass")), []), names, where) for node in nodes.values()
    ]
    tensors = _neurips_tensors(_entries(document, "edges", _EDGE_KEYS, where), nodes, names, where)
    try:
        train = any(op.phase is Phase.BACKWARD for op in ops)
        return OpGraph.build(ops, tensors, stem(where), Origin("neurips", train=train))
    except GraphError as error:
        raise GraphFileError(f"{where}: {error}") from None


def _names(nodes: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """The files' own names where they tell all nodes apart, else the ids."""
    names = {number: str(node.get("name", number)) for number, node in nodes.items()}
    return names if len(set(names.values())) == len(names) else {number: str(number) for number in nodes}


def _neurips_op(
    node: Mapping[str, Any],
    nodes: Mapping[int, Mapping[str, Any]],
    same_colour: list[int],
    names: Mapping[int, str],
    where: str,
) -> Op:
    name, backward = names[node["id"]], bool(node["isBackwardNode"])
    mirrored = [number for number in same_colour if not nodes[number]["isBackwardNode"]] if backward else []
    values = {key: _number(node, key, f"{where}: op {name!r}") for key in ("fpgaLatency", "cpuLatency", "size")}
    return Op(
        name=name,
        kept_bytes=round(values["size"]),
        colocation=str(node["colorClass"]) if len(same_colour) > 1 else None,
        phase=Phase.BACKWARD if backward else Phase.FORWARD,
        forward_of=names[mirrored[0]] if len(mirrored) == 1 else None,
        pins=() if node["supportedOnFpga"] else (CPU,),
        time_s={ACCELERATOR: values["fpgaLatency"] / 1000, CPU: values["cpuLatency"] / 1000},
    )


def _neurips_tensors(
    edges: list[dict[str, Any]], nodes: Mapping[int, Any], names: Mapping[int, str], where: str
) -> list[Tensor]:
    cost: dict[int, float] = {}
    readers: dict[int, list[str]] = defaultdict(list)
    for edge in edges:
        source, target = edge["sourceId"], edge["destId"]
        for end in (source, target):
            if end not in nodes:
                raise GraphFileError(f"{where}: edge {source} -> {target} ends at node {end}, which the file lacks.")
        ms = _number(edge, "cost", f"{where}: edge {source} -> {target}")
        if cost.setdefault(source, ms) != ms:
            raise GraphFileError(
                f"{where}: the edges of op {names[source]!r} cost {cost[source]} and {ms} ms; one output has one cost."
            )
        readers[source].append(names[target])
    written = [Tensor(names[u], 0, tuple(readers[u]), cost[u] / 1000) for u in readers]
    return written + [Tensor(names[u], 0) for u in nodes if u not in readers]


def _devices(document: Mapping[str, Any], where: str) -> PublishedDevices:
    accelerators, cpus, memory = (_number(document, key, where) for key in _DEVICE_KEYS)
    if accelerators + cpus < 1 or accelerators % 1 or cpus % 1 or min(accelerators, cpus, memory) < 0:
        raise GraphFileError(
            f"{where}: maxFPGAs {accelerators}, maxCPUs {cpus}, maxSizePerFPGA {memory}: expected whole numbers of "
            "devices, at least one in all, and 0 bytes or more."
        )
    if accelerators + cpus > LARGEST_CLUSTER:
        raise GraphFileError(
            f"{where}: maxFPGAs {accelerators:g} and maxCPUs {cpus:g} are more than {LARGEST_CLUSTER} devices; lower "
            "them."
        )
    return PublishedDevices(int(accelerators), int(cpus), float(memory))


def _entries(document: Mapping[str, Any], key: str, needed: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    entries = document[key]
    if not isinstance(entries, list):
        raise GraphFileError(f"{where}: {key} is not a list.")
    for i, entry in enumerate(entries):
        missing = [name for name in needed if not isinstance(entry, dict) or not _is_plain(entry.get(name))]
        if missing:
            raise GraphFileError(f"{where}: {key}[{i}] has no usable {missing[0]!r}; add it.")
    return entries


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _number(entry: Mapping[str, Any], key: str, what: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        raise GraphFileError(f"{what} has {key} = {value!r}; expected a finite number, 0 or more.")
    return float(value)


# -- PipeDream ------------------------------------------------------------------------------------------------

_NUMBER = r"[^,;\s\]]+"
_NODE = re.compile(
    rf"(?P<name>\S+) -- (?P<what>.*) -- forward_compute_time=(?P<forward>{_NUMBER}), "
    rf"backward_compute_time=(?P<backward>{_NUMBER}), "
    rf"activation_size=(?P<activation>{_NUMBER}|\[[^\]]*\]), parameter_size=(?P<parameter>{_NUMBER})"
    r"(?: -- stage_id=\S+)?"
)
_EDGE = re.compile(r"\t(?P<source>\S+) -- (?P<target>\S+)")
_OPTIMIZER = OPTIMIZERS["momentum"]  # PipeDream's SGD


@dataclass(frozen=True)
class _ProfileNode:
    """One node of a profile: times in seconds, sizes in bytes."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def is_input(self) -> bool:
        return self.kind.startswith("Input")


def is_profile_line(line: str) -> bool:
    """Whether a line is a node of a PipeDream profile."""
    return re.match(r"\S+ -- .* -- forward_compute_time=", line) is not None


def read_pipedream(path: Path, train: bool = False) -> OpGraph:
    """Read a PipeDream profile: one op per node, times measured on one kind of GPU and so taken for every device.

    Several outputs of a node count as one tensor of their summed size, as in PipeDream. The time of an ``Input`` node
    is data loading and counts as zero.

    With ``train`` every node but the inputs also gets an op ``NAME.backward``, on the same device as its forward op.
    It reads the node's inputs and output (the stashed activations) and, from each consumer's backward op, a gradient
    of the activation's size. Parameters then count three times: with their gradients and SGD's momentum. The profiles
    time no update, so there is no update op.

    Raises:
        GraphFileError: a line that is neither node nor edge, an unknown node, or a broken rule of `OpGraph`; the
            message names the line.
    """
    where = os.fspath(path)
    nodes, inputs = _profile(read_text(path), where)
    readers: dict[str, list[str]] = {name: [] for name in nodes}
    for target, sources in inputs.items():
        for source in sources:
            readers[source].append(target)
    ops = [_forward_op(node, train) for node in nodes.values()]
    tensors = [Tensor(node.name, node.activation_bytes, tuple(readers[node.name])) for node in nodes.values()]
    if train:
        backward = [node for node in nodes.values() if not node.is_input]
        ops += [_backward_op(node) for node in backward]
        tensors = [_stashed(tensor, nodes) for tensor in tensors]
        tensors += [
            Tensor(_mirror(node.name), nodes[source].activation_bytes, (_mirror(source),))
            for node in backward
            for source in inputs[node.name]
            if not nodes[source].is_input
        ]
    try:
        origin = Origin("pipedream", train, "module", _OPTIMIZER.name if train else None)
        return OpGraph.build(ops, tensors, stem(where), origin)
    except GraphError as error:
        raise GraphFileError(f"{where}: {error}") from None


def _profile(text: str, where: str) -> tuple[dict[str, _ProfileNode], dict[str, list[str]]]:
    """Nodes by name, and for each the nodes it reads (each once)."""
    nodes: dict[str, _ProfileNode] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if edge := _EDGE.fullmatch(line.rstrip()):
            edges.append((number, edge["source"], edge["target"]))
        elif node := _NODE.fullmatch(line.strip()):
            if node["name"] in nodes:
                raise GraphFileError(f"{where}, line {number}: node {node['name']!r} appears twice; rename one.")
            nodes[node["name"]] = _profile_node(node, f"{where}, line {number}")
        elif line.strip():
            raise GraphFileError(
                f"{where}, line {number}: expected a node (NAME -- DESCRIPTION -- forward_compute_time=..., "
                f"backward_compute_time=..., activation_size=..., parameter_size=...) or an edge, got {line[:60]!r}."
            )
    inputs: dict[str, dict[str, None]] = {name: {} for name in nodes}
    for number, source, target in edges:
        for end in (source, target):
            if end not in nodes:
                raise GraphFileError(f"{where}, line {number}: the edge names node {end!r}, which the file lacks.")
        inputs[target][source] = None
    return nodes, {name: list(sources) for name, sources in inputs.items()}


def _profile_node(match: re.Match[str], what: str) -> _ProfileNode:
    def number(key: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 2**63:
            raise GraphFileError(f"{what}: node {match['name']!r} has {key} = {text}; expected a number, 0 or more.")
        return value

    kind = re.split(r"[(\s]", match["what"], maxsplit=1)[0]
    is_input = kind.startswith("Input")
    activations = [text for text in match["activation"].strip("[]").split(";") if text.strip()]
    return _ProfileNode(
        name=match["name"],
        kind=kind,
        forward_s=0.0 if is_input else number("forward_compute_time", match["forward"]) / 1000,
        backward_s=0.0 if is_input else number("backward_compute_time", match["backward"]) / 1000,
        activation_bytes=round(sum(number("activation_size", text.strip()) for text in activations)),
        parameter_bytes=round(number("parameter_size", match["parameter"])),
    )


def _forward_op(node: _ProfileNode, train: bool) -> Op:
    return Op(
        name=node.name,
        kind=node.kind,
        parameter_bytes=node.parameter_bytes,
        gradient_bytes=node.parameter_bytes if train else 0,
        optimizer_bytes=node.parameter_bytes * _OPTIMIZER.states if train else 0,
        colocation=node.name if train and not node.is_input else None,
        time_s={ANY_DEVICE: node.forward_s},
    )


def _backward_op(node: _ProfileNode) -> Op:
    return Op(
        name=_mirror(node.name),
        kind=f"{node.kind}Backward",
        colocation=node.name,
        phase=Phase.BACKWARD,
        forward_of=node.name,
        time_s={ANY_DEVICE: node.backward_s},
    )


def _stashed(tensor: Tensor, nodes: Mapping[str, _ProfileNode]) -> Tensor:
    """An activation, read again by the backward ops of its producer and its consumers."""
    again = [_mirror(name) for name in (tensor.producer, *tensor.consumers) if not nodes[name].is_input]
    return Tensor(tensor.producer, tensor.bytes, (*tensor.consumers, *again))


def _mirror(name: str) -> str:
    return f"{name}.backward"
