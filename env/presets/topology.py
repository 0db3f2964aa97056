"""How the GPUs of a host are joined, as ``nvidia-smi topo -m`` prints it: a matrix of links read as a preset.

``(nvidia-smi -L; nvidia-smi topo -m) > topo.txt`` has all of it: which GPUs there are, and for each pair the best way
between them.

* NV# is so many NVLinks. Where each GPU has all of its own to each other one, an NVSwitch joins them; else each pair
  has a link of its own.
* PIX (one PCIe bridge), PXB (several), PHB (the host bridge of a CPU), NODE (host bridges of one NUMA node) and SYS
  (from socket to socket) are a tree of switches: GPUs are below one switch as far as the matrix puts them there, and
  each switch below the next one.
* Columns of network adapters say nothing of their rates and are not read. The outputs of several hosts, one behind the
  other, are a cluster where a line says what joins them: ``network 8 x 400 Gb/s``, adapters of each host.

Rates: NVLink and PCIe as in `env.presets.parts`; from socket to socket 6 GB/s beside PCIe 3.0 (Broadwell's QPI), 16
beside PCIe 4.0 (AMD Rome and Milan), 22 beside PCIe 5.0 (Sapphire Rapids): NCCL 2.27, src/graph/topo.h. The matrix
does not tell which CPUs there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import networkx as nx

from env.device import Device, Link
from env.presets.gpus import known_device
from env.presets.machines import GPUS, MOST_HOSTS, NVLINKS, PORTS, Gpu, NvLinks
from env.presets.parts import (
    GBIT_BYTES_PER_S,
    NVLINK_S,
    PCIE_HOP_S,
    QPI_BYTES_PER_S,
    Port,
    Preset,
    adapters_of,
    numbered,
    switched_host,
)
from graphs.errors import ClusterError

HOW = "(nvidia-smi -L; nvidia-smi topo -m) > topo.txt"

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HEAD = re.compile(r"^\s*(GPU\d+\s+)+")
_GPU = re.compile(r"GPU\d+")
_LISTED = re.compile(r"^\s*GPU (\d+): (.+?)(?: \(UUID: .*)?\s*$")
_NVLINKS = re.compile(r"NV(\d+)")
_NETWORK = re.compile(r"^\s*network:?\s+(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*Gb(?:it)?/s\s*$", re.IGNORECASE | re.MULTILINE)
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first
_OLD = {"SOC": "SYS"}  # as drivers before 2018 call it
_SWITCHES = ("pcie", "bridge", "hostbridge", "socket")  # by which those of each class but the last are joined
_READ = "NCCL 2.27 topo.h and tuning.cc"

_BRIDGED = NvLinks(12, 25e9, 0.78, PORTS["pcie3"])  # three bridges between two cards, as of A100 PCIe
# Bytes per second between sockets, by those of a slot.
_BETWEEN_SOCKETS = {12e9: QPI_BYTES_PER_S, 24e9: 16e9, 48e9: 22e9}


@dataclass(frozen=True)
class Topology:
    """A matrix of ``nvidia-smi topo -m``.

    Attributes:
        names: of the GPUs, as ``nvidia-smi -L`` lists them; () where it was not given.
        cells: [k][k], the words of the matrix, ``"X"`` on its diagonal.
        affinities: [k], the CPUs near to each GPU, "" where that is not said.
    """

    names: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    affinities: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many GPUs."""
        return len(self.cells)

    def nvlinks(self, a: int, b: int) -> int:
        """NVLinks between two GPUs."""
        found = _NVLINKS.fullmatch(self.cells[a][b])
        return int(found[1]) if found else 0

    def distance(self, a: int, b: int) -> int:
        """Number in `_PCIE` of the way between two GPUs over PCIe.

        Where the matrix tells of NVLinks instead, those near to the same CPUs are in one NUMA node.
        """
        cell = self.cells[a][b]
        if cell in _PCIE:
            return _PCIE.index(cell)
        return len(_PCIE) - 1 - (self.affinities[a] == self.affinities[b])


def is_topology(text: str) -> bool:
    """Whether a text has a matrix of ``nvidia-smi topo -m``."""
    return any(_HEAD.match(line) for line in _COLOURS.sub("", text).splitlines())


def topology_of(text: str) -> Topology:
    """The matrix in a text.

    Raises:
        ClusterError: none, an incomplete one, words that are none of its own, or one that contradicts itself.
    """
    lines = _COLOURS.sub("", text).splitlines()
    head = next((k for k, line in enumerate(lines) if _HEAD.match(line)), None)
    if head is None:
        raise ClusterError(f"there is no matrix of `nvidia-smi topo -m`; make the file by {HOW}.")
    count = next((k for k, word in enumerate(lines[head].split()) if not _GPU.fullmatch(word)), None)
    gpus = lines[head].split()[:count]
    rows = {words[0]: words[1:] for line in lines[head + 1 :] if (words := line.split()) and words[0] in gpus}
    missing = next((gpu for gpu in gpus if len(rows.get(gpu, ())) < len(gpus)), None)
    if missing is not None:
        raise ClusterError(
            f"the matrix of `nvidia-smi topo -m` has no complete row for {missing}; expected {len(gpus)} words behind "
            f"it, copy all of the output: {HOW}."
        )
    cells = tuple(tuple(_OLD.get(word, word) for word in rows[gpu][: len(gpus)]) for gpu in gpus)
    _check(gpus, cells)
    listed = {int(found[1]): found[2] for line in lines if (found := _LISTED.match(line))}
    others = len(lines[head].partition("CPU Affinity")[0].split()) - len(gpus)
    affinities = tuple(next(iter(rows[gpu][len(gpus) + others :]), "") for gpu in gpus)
    names = tuple(listed.get(int(gpu.removeprefix("GPU")), "") for gpu in gpus) if listed else ()
    return Topology(names, cells, affinities)


def _check(gpus: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Raises: ClusterError: a word that is none, or two ways between one pair."""
    for a, row in enumerate(cells):
        for b, word in enumerate(row):
            known = word == "X" if a == b else word in _PCIE or bool(_NVLINKS.fullmatch(word))
            if not known:
                raise ClusterError(
                    f"`nvidia-smi topo -m` has {word!r} between {gpus[a]} and {gpus[b]}; expected "
                    f"{'X' if a == b else 'NV#, ' + ', '.join(_PCIE)}."
                )
            if cells[b][a] != word:
                raise ClusterError(
                    f"`nvidia-smi topo -m` has {word} from {gpus[a]} to {gpus[b]} and {cells[b][a]} back; expected one "
                    "way both ways, copy the output as it is."
                )


def preset_of(text: str, name: str) -> Preset:
    """The hosts that a text of ``nvidia-smi -L`` and ``nvidia-smi topo -m`` is about, one behind the other.

    Args:
        name: of the cluster.

    Raises:
        ClusterError: as of `topology_of`; no names of GPUs, or one without figures; NVLinks that such a GPU has not;
            several hosts and no line that says what joins them.
    """
    hosts = [_host(each, name) for each in _texts(text)]
    if len(hosts) == 1:
        return hosts[0]
    if len(hosts) > MOST_HOSTS:
        raise ClusterError(f"there are {len(hosts)} hosts; expected at most {MOST_HOSTS}.")
    network = _NETWORK.search(text)
    if network is None or not int(network[1]):
        raise ClusterError(
            f"there are matrices of {len(hosts)} hosts, and nothing says what joins these; add a line with the "
            "adapters of each host, such as 'network 8 x 400 Gb/s'."
        )
    adapter = replace(PORTS["ndr"], nominal_bytes_per_s=float(network[2]) * GBIT_BYTES_PER_S)
    devices, links = list[Device](), list[Link]()
    for number, host in enumerate(hosts):
        before = f"host{number}/"
        own = [replace(device, name=f"{before}{device.name}") for device in host.devices]
        devices += own
        links += [replace(link, src=f"{before}{link.src}", dst=f"{before}{link.dst}") for link in host.links]
        links += adapters_of(own, int(network[1]), adapter, before, "network")
    kinds = Counter(host.summary for host in hosts)
    inside = "; ".join(f"{count} hosts of {kind}" for kind, count in kinds.items())
    summary = f"{inside}; between them {network[1]} adapters of {network[2]} Gbit/s a host"
    source = f"{hosts[0].source}; network as given, reached and latency as of InfiniBand"
    fabrics = {id(host.fabric): host.fabric for host in hosts}
    return Preset(name, tuple(devices), tuple(links), summary, source, hosts[0].fabric if len(fabrics) == 1 else None)


def _texts(text: str) -> list[str]:
    """The part of a text that is about each host: all up to the last row of its matrix."""
    lines, found, begin = _COLOURS.sub("", text).splitlines(), list[str](), 0
    while (head := next((k for k in range(begin, len(lines)) if _HEAD.match(lines[k])), None)) is not None:
        gpus = [word for word in lines[head].split() if _GPU.fullmatch(word)]
        rows = [k for k in range(head + 1, len(lines)) if lines[k].split()[:1] in ([gpu] for gpu in gpus)]
        end = rows[: len(gpus)][-1] + 1 if rows else len(lines)
        found.append("\n".join(lines[begin:end]))
        begin = end
    return found if len(found) > 1 else [text]


def _host(text: str, name: str) -> Preset:
    """One host; arguments and errors as of `preset_of`."""
    found = topology_of(text)
    models = _models(found)
    _check_nvlinks(found, models)
    counts = Counter(model.model for model in models)
    about = ", ".join(f"{count} x {model}" for model, count in counts.items())
    about = f"{about}, joined by {joined}" if (joined := _joined(found)) else about
    source = (
        f"nvidia-smi topo -m; {'; '.join(dict.fromkeys(map(_sheet, models)))}; links: NVLink, PCIe, sockets {_READ}"
    )
    kind = _kind(models[0]) if len(counts) == 1 else None
    pairs, all_links = list(combinations(range(found.size), 2)), NVLINKS.get(models[0].model, _BRIDGED).count
    is_switched = bool(pairs) and all(found.nvlinks(a, b) == all_links for a, b in pairs)
    if kind is not None and kind.switch == "nvswitch" and is_switched:
        devices, links = switched_host(kind.model, found.size, kind.port, "nvswitch")
        return Preset(name, devices, tuple(links), about, source, kind.fabric)
    gpus = numbered(models)
    has_all = all(found.nvlinks(a, b) for a, b in pairs)
    links = [*_nvlinks(found, gpus), *(() if has_all else _tree(found, gpus))]
    return Preset(name, gpus, tuple(links), about, source)


def _models(found: Topology) -> list[Device]:
    if not found.names or not all(found.names):
        raise ClusterError(
            "`nvidia-smi topo -m` says how GPUs are joined, not which they are; put the lines of `nvidia-smi -L` "
            f"before it: {HOW}."
        )
    models = []
    for name in found.names:
        device = known_device(name)
        if device is None:
            known = ", ".join(dict.fromkeys(gpu.model.model for gpu in GPUS.values()))
            raise ClusterError(
                f"there are no figures of GPU {name!r}; known are {known}. Make a cluster file with its rates "
                "(docs/files.md), or measure it by `placement calibrate -o mine.toml`."
            )
        models.append(device)
    return models


def _check_nvlinks(found: Topology, models: Sequence[Device]) -> None:
    """Raises: ClusterError: more NVLinks than a GPU has, or none of one that is sold with them."""
    for a, model in enumerate(models):
        links = NVLINKS.get(model.model, _BRIDGED).count
        most = max((found.nvlinks(a, b) for b in range(found.size)), default=0)
        if most > links:
            raise ClusterError(
                f"`nvidia-smi topo -m` has NV{most} at GPU{a}, and a {model.model} has at most {links} NVLinks; "
                "correct the names of the GPUs, or the matrix."
            )
        if model.model in NVLINKS and not most and found.size > 1:
            raise ClusterError(
                f"`nvidia-smi topo -m` shows no NVLink at GPU{a}, a {model.model}, which has {links}; `topo -mp` "
                "leaves them out, give the output of `topo -m`."
            )


def _nvlinks(found: Topology, gpus: Sequence[Device]) -> Iterator[Link]:
    """A link for each pair that has NVLinks; a port to a switch where a GPU has more in all pairs than it has links."""
    for a, gpu in enumerate(gpus):
        own = NVLINKS.get(gpu.model, _BRIDGED)
        rate, reached = own.bytes_per_s, own.reached
        counts = [found.nvlinks(a, b) for b in range(found.size)]
        if sum(counts) > own.count:
            yield from Port(max(counts) * rate, reached, NVLINK_S / 2).between(gpu.name, "nvswitch")
            continue
        for b in range(a + 1, found.size):
            if counts[b]:
                yield from Port(counts[b] * rate, reached, NVLINK_S).between(gpu.name, gpus[b].name)


@dataclass(frozen=True)
class _Below:
    """A GPU or a switch, the port by which it is joined to what is above it, and the GPUs at or below it."""

    name: str
    port: Port
    gpus: frozenset[int]


def _tree(found: Topology, gpus: Sequence[Device]) -> Iterator[Link]:
    """PCIe: each GPU below the switch of its nearest ones, each switch below that of the next class, sockets on top."""
    below = [_Below(gpu.name, _slot(gpu), frozenset([k])) for k, gpu in enumerate(gpus)]
    for level, switch in enumerate(_SWITCHES):
        above = []
        for group in _grouped(found, level):
            members = [each for each in below if each.gpus <= group]
            if len(members) == 1:
                above.append(members[0])
                continue
            name = f"{switch}{len(above)}"
            for each in members:
                yield from each.port.between(each.name, name)
            widest = max(each.port.nominal_bytes_per_s for each in members)
            above.append(_Below(name, Port(widest, 1.0, PCIE_HOP_S), group))
        below = above
    between = min(_BETWEEN_SOCKETS.get(_slot(gpu).nominal_bytes_per_s, QPI_BYTES_PER_S) for gpu in gpus)
    for each in below if len(below) > 1 else ():
        yield from Port(between, 1.0, each.port.latency_s).between(each.name, "sockets")


def _grouped(found: Topology, level: int) -> list[frozenset[int]]:
    """GPUs that are no further apart than a class, or joined by others that are."""
    near = nx.Graph()
    near.add_nodes_from(range(found.size))
    near.add_edges_from(pair for pair in combinations(range(found.size), 2) if found.distance(*pair) <= level)
    return [frozenset(group) for group in nx.connected_components(near)]


def _sheet(gpu: Device) -> str:
    kind = _kind(gpu)
    return "NVIDIA V100 data sheet, 2020" if kind is None else kind.sheet


def _kind(gpu: Device) -> Gpu | None:
    return next((kind for kind in GPUS.values() if kind.model.model == gpu.model), None)


def _slot(gpu: Device) -> Port:
    """The way of a GPU to its PCIe switch."""
    kind = _kind(gpu)
    if kind is not None and kind.switch == "pcie":
        return kind.port
    return NVLINKS.get(gpu.model, _BRIDGED).slot


def _joined(found: Topology) -> str:
    """``"NV18"``, ``"NV1, NV2 and SYS"``: the words of the matrix, for people."""
    words = sorted({found.cells[a][b] for a, b in combinations(range(found.size), 2)})
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
