"""`Cluster`: devices, switches and links, and the routes between devices."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from env.device import (
    BLOCKING,
    COMMUNICATIONS,
    OVERLAPPED,
    Device,
    Link,
    MeasuredCollective,
    both_ways,
    check_fraction,
    check_string,
    host_of,
    refusal,
)
from env.fabric import Fabric, Protocol
from env.lanes import OUTER_LANE, check_memories, host_devices, lanes_of, memory_owner, with_lanes
from env.local import measurer
from env.routes import ROUTE_BYTES, Route, Routes
from graphs.arrays import frozen
from graphs.codec import LATER, plain, record_of, short, unknown_field
from graphs.disk import plain_reason, stem, too_much
from graphs.errors import ClusterError, UnknownNameError
from graphs.records import LANE

if TYPE_CHECKING:
    from env.presets import Preset

__all__ = [
    "BLOCKING",
    "COMMUNICATIONS",
    "LANE",
    "OVERLAPPED",
    "ROUTE_BYTES",
    "UNLIMITED_BYTES",
    "Cluster",
    "Device",
    "Fabric",
    "Link",
    "MeasuredCollective",
    "Protocol",
    "Route",
    "both_ways",
]

MEASURED, PEAK = "measured", "peak"
RATES = (MEASURED, PEAK)  # of which a preset may be
UNLIMITED_BYTES = 2**60  # the memory of a device whose memory is not modelled
_LIKE_A_DEVICE = 0.7  # similarity by difflib: gpu7 is like gpu0, switch0 is not
_ABOUT = ("name", "summary", "source", "communication")
_UNLIMITED = "inf"  # in JSON: the bandwidth of a link without a limit
_NAMES = ("name", "kind", "model", "memory_of", "src", "dst", "source")
_RecordT = TypeVar("_RecordT")
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Cluster:
    """A frozen set of devices and links. `Cluster.preset(name)` for real machines, `from_toml` for your own.

    Attributes:
        name: for people.
        devices: at least one; their order breaks ties.
        links: directed; ends are devices or switches (any end that is not a device is a switch).
        summary: one line for people.
        source: where the figures come from.
        communication: how transfers count in the objective throughput (docs/score.md): ``"overlapped"``, devices
            compute meanwhile and links carry the load; or ``"blocking"``, both ends do nothing else meanwhile.
        collectives: how long collectives take, where that was measured.
        fabric: what collectives reach where they were not measured; None, or a kind that it does not know: by algorithm
            over the links.

    Raises:
        ClusterError: no device, a duplicate name, a doubled link or collective, two devices without a route, an unknown
            communication, or a device on a memory that is not there or described otherwise.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    summary: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    communication: str = OVERLAPPED
    collectives: tuple[MeasuredCollective, ...] = field(default=(), metadata=LATER)
    fabric: Fabric | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        for key in ("name", "summary", "source"):
            check_string("a cluster", key, getattr(self, key), may_be_empty=True)
        if self.communication not in COMMUNICATIONS:
            raise refusal(
                f"cluster {self.name!r}", "communication", self.communication, " or ".join(map(repr, COMMUNICATIONS))
            )
        if not self.devices:
            raise ClusterError(f"cluster {self.name!r} has no devices; add at least one.")
        _refuse_twice((d.name for d in self.devices), f"cluster {self.name!r} has two devices named")
        _refuse_twice((f"{link.src} -> {link.dst}" for link in self.links), f"cluster {self.name!r} has two links for")
        _refuse_twice(
            (_named(each) for each in self.collectives),
            f"cluster {self.name!r} has two measured collectives",
        )
        _refuse_mistyped_ends(self)
        check_memories(self)
        _ = self.routes

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process say, is built anew, so that its arrays are read-only, as kernels expect them."""
        return Cluster, tuple(getattr(self, each.name) for each in fields(self))

    @staticmethod
    def preset(name: str, rates: str = MEASURED) -> Cluster:
        """A real machine by name; ``placement clusters`` lists them.

        Args:
            rates: ``"measured"``, what kernels, links and collectives reach where that is known, with memory left to
                the allocator there; or ``"peak"``, what data sheets say (`at_peak`).

        Raises:
            UnknownNameError: no such machine, or no such rates.
        """
        from env.presets import preset  # only where one is asked for by name

        if not isinstance(rates, str) or rates not in RATES:
            raise UnknownNameError("rates", rates, RATES)
        found = _made(preset(name))
        return found.at_peak() if rates == PEAK else found

    @staticmethod
    def from_topology(path: str | Path) -> Cluster:
        """Read what ``(nvidia-smi -L; nvidia-smi topo -m)`` prints: the GPUs of a host, or several, and their links.

        Raises:
            ClusterError: unreadable, or no such output (`env.presets.topology`); the message names the file.
        """
        from env.presets.topology import preset_of

        try:
            return _made(preset_of(Path(path).read_text(encoding="utf-8-sig"), stem(path)))
        except OSError as error:
            raise ClusterError(f"cannot read {path}: {error.strerror}.") from None
        except (ClusterError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: {plain_reason(error)}") from None

    def at_peak(self) -> Cluster:
        """This cluster at the rates of data sheets: devices by the roofline, collectives by algorithm over links."""
        from env.presets import gpus

        devices = tuple(map(gpus.at_peak, self.devices))
        links = tuple(link.at_peak() for link in self.links)
        return replace(self, devices=devices, links=links, collectives=(), fabric=None)

    @staticmethod
    def local(devices: int | None = None, *, seed: int = 0) -> Cluster:
        """This machine, measured once: its GPUs and CPU or, without a GPU or with ``devices``, that many CPU cores."""
        measured: Cluster = measurer()(devices, seed=seed)
        return measured

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """Read a cluster file, as `to_toml` writes it.

        Raises:
            ClusterError: unreadable, or a rule of `Cluster` is broken; the message names the file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            if (reason := too_much(text)) is not None:
                raise ClusterError(f"{path} is not a TOML cluster file: {reason}.")
            data = tomllib.loads(text)
        except OSError as error:
            raise ClusterError(f"cannot read cluster file {path}: {error.strerror}.") from None
        except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
            raise ClusterError(f"{path} is not a TOML cluster file: {plain_reason(error)}.") from None
        try:
            return Cluster.from_dict(data, default_name=stem(path))
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None

    def with_memory_fraction(self, fraction: float) -> Cluster:
        """This cluster, of which placements may fill that share of each device's memory, whatever it reserved before.

        Memory that is not modelled stays so.

        Raises:
            ClusterError: not above 0 and at most 1.
        """
        check_fraction(f"cluster {self.name!r}", "memory fraction", fraction)
        return replace(
            self,
            devices=tuple(
                replace(device, reserved_bytes=device.memory_bytes - math.floor(device.memory_bytes * fraction))
                if device.memory_bytes < UNLIMITED_BYTES
                else device
                for device in self.devices
            ),
        )

    def with_lanes(self, *, outer: bool = False) -> Cluster:
        """This cluster, with a lane for each device: a device ``NAME.lane`` that takes only ops pinned to it.

        A lane is of kind ``"lane"``, has its device's rates, works in its memory and has its routes, so that transfers
        and reductions that run on it do not wait for the ops of its device. Lanes come behind all other devices; a
        device that has one already gets no other, and a CPU core whose collectives were measured gets none.

        Args:
            outer: behind these another one for each device, ``NAME.outer_lane``, for collectives between hosts.
        """
        return with_lanes(self, outer=outer)

    def to_toml(self) -> str:
        """The cluster as TOML text; ``from_toml`` of it equals this cluster."""
        data = plain(self)
        for link in data["links"]:
            if link["exclusive"]:  # as links are
                del link["exclusive"]
        return "\n".join(_toml(data)) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The cluster as JSON values; ``from_dict`` of it equals this cluster."""
        found: dict[str, Any] = plain(self)
        found |= {key: [_with_texts(entry) for entry in found[key]] for key in ("devices", "links")}
        return {key: found[key] for key in _ABOUT} | found

    @staticmethod
    def from_dict(data: Any, default_name: str = "") -> Cluster:
        """Read what `to_dict` wrote.

        Args:
            default_name: of a cluster without one.

        Raises:
            ClusterError: an unknown or missing key, a value of another type, or a broken rule of `Cluster`.
        """
        if not isinstance(data, Mapping):
            raise ClusterError(f"the cluster is {short(data)}; expected an object with devices and links.")
        known = tuple(each.name for each in fields(Cluster))
        for key in data:
            if key not in known:
                raise ClusterError(unknown_field("a cluster", key, known))
        devices, links, collectives = (_tables(data, key) for key in ("devices", "links", "collectives"))
        return Cluster(
            devices=tuple(
                _record(Device, entry, f"device {entry['name']!r}" if "name" in entry else f"device number {i}")
                for i, entry in enumerate(devices, start=1)
            ),
            links=tuple(link for entry in links for link in _links_of(entry)),
            collectives=tuple(
                _record(MeasuredCollective, entry, f"measured collective number {i}")
                for i, entry in enumerate(collectives, start=1)
            ),
            fabric=_record(Fabric, data["fabric"], "the fabric") if "fabric" in data else None,
            **{"name": default_name} | {key: data[key] for key in _ABOUT if key in data},
        )

    def measured(self, kind: str, ranks: int, hosts: int = 1) -> MeasuredCollective | None:
        """The collective of that kind among that many devices on so many hosts, if it was measured."""
        found = self._measured.get((kind, ranks, hosts))
        return found if found is not None else self._measured.get((kind, ranks, 0))

    @cached_property
    def _measured(self) -> dict[tuple[str, int, int], MeasuredCollective]:
        return {(each.kind, each.ranks, each.hosts): each for each in self.collectives}

    @cached_property
    def host_number(self) -> NDArray[np.int64]:
        """int64 [D]: devices of the same number are on one host; all are, where names do not say (``host0/gpu0``)."""
        number: dict[str, int] = {}
        names = (host_of(device.name) or "" for device in self.devices)
        return frozen(np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64))

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    @property
    def is_blocking(self) -> bool:
        """True if devices stop computing to communicate."""
        return self.communication == BLOCKING

    @cached_property
    def compute_devices(self) -> NDArray[np.int64]:
        """int64: numbers of the devices that are no CPUs, or of all where there are only CPUs; no lanes."""
        kinds = [device.kind for device in self.devices]
        others = [d for d, kind in enumerate(kinds) if kind not in ("cpu", LANE)]
        return frozen(np.array(others or [d for d, kind in enumerate(kinds) if kind != LANE], dtype=np.int64))

    @cached_property
    def lane_of(self) -> NDArray[np.int64]:
        """int64 [D]: the number of each device's lane, -1 where it has none."""
        return frozen(lanes_of(self.devices, LANE))

    @cached_property
    def outer_lane_of(self) -> NDArray[np.int64]:
        """int64 [D]: the number of each device's lane for collectives between hosts, -1 where it has none."""
        return frozen(lanes_of(self.devices, OUTER_LANE))

    @cached_property
    def host_devices(self) -> NDArray[np.int64]:
        """int64 [D]: the number of the CPU in each device's host, -1 where it has none."""
        return frozen(host_devices(self))

    @cached_property
    def memory_owner(self) -> NDArray[np.int64]:
        """int64 [D]: the number of the device in whose memory each one works; mostly its own."""
        return frozen(memory_owner(self.devices))

    @cached_property
    def free_links(self) -> tuple[int, ...]:
        """Numbers of the links between devices on one memory, which no route lists."""
        return tuple(number for number, link in enumerate(self.links) if link.is_free)

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """int64 [D]: devices of the same number compute alike and have as much memory."""
        number: dict[str, int] = {}
        texts = (json.dumps(plain(device) | {"name": "", "memory_of": ""}) for device in self.devices)
        return frozen(np.array([number.setdefault(text, len(number)) for text in texts], dtype=np.int64))

    @cached_property
    def device_index(self) -> dict[str, int]:
        """Device name -> its number."""
        return {device.name: i for i, device in enumerate(self.devices)}

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Devices (node attribute ``device``), switches and links (edge attributes ``link``, ``index``)."""
        result = nx.DiGraph(name=self.name)
        for device in self.devices:
            result.add_node(device.name, device=device)
        for index, link in enumerate(self.links):
            result.add_edge(link.src, link.dst, link=link, index=index)
        return result

    @cached_property
    def routes(self) -> Routes:
        """The fastest route for every ordered pair of different devices."""
        found = Routes(self)
        found.check()
        return found

    @cached_property
    def hash(self) -> str:
        """Content hash (SHA-256, hex) of devices, links, communication, measured collectives and fabric."""
        content = {key: value for key, value in plain(self).items() if key not in ("name", "summary", "source")}
        content.get("fabric", {}).pop("source", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.hash)


def _made(preset: Preset) -> Cluster:
    """A preset, as PyTorch uses its devices."""
    from env.presets.gpus import under_torch

    devices = under_torch(preset.devices)
    return Cluster(preset.name, devices, preset.links, preset.summary, preset.source, fabric=preset.fabric)


def _tables(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = data.get(key, [])
    if not (isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)):
        raise ClusterError(f"{key} is {short(entries)}; expected tables, each under its own [[{key}]].")
    return entries


def _record(kind: type[_RecordT], entry: Any, what: str) -> _RecordT:
    return record_of(kind, _with_numbers(entry), what, ClusterError, checked=False)


_LINK_KEYS = (*(each.name for each in fields(Link)), "between")


def _links_of(entry: Mapping[str, Any]) -> tuple[Link, ...]:
    """One link, or both of a connection that a file gives at once."""
    ends = entry.get("between", [entry.get("src", "?"), entry.get("dst", "?")])
    if not (isinstance(ends, list) and len(ends) == 2):
        raise ClusterError(f"a link has between = {ends!r}; expected two names, e.g. ['gpu0', 'gpu1'].")
    what = f"the link between {ends[0]} and {ends[1]}" if "between" in entry else f"the link {ends[0]} -> {ends[1]}"
    for key in entry:
        if key not in _LINK_KEYS:
            raise ClusterError(unknown_field(what, key, _LINK_KEYS))
    if "between" not in entry:
        return (_record(Link, entry, what),)
    rest = {key: value for key, value in entry.items() if key != "between"}
    return tuple(_record(Link, {"src": src, "dst": dst, **rest}, what) for src, dst in (ends, ends[::-1]))


def _with_texts(value: Any) -> Any:
    """A value with texts for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    return _UNLIMITED if value == math.inf else value


def _with_numbers(value: Any, key: str = "") -> Any:
    """The inverse of `_with_texts`."""
    if isinstance(value, dict):
        return {key: _with_numbers(item, key) for key, item in value.items()}
    return math.inf if value == _UNLIMITED and key not in _NAMES else value


def _named(each: MeasuredCollective) -> str:
    return f"{each.kind} among {each.ranks}" + (f" on {each.hosts} hosts" if each.hosts else "")


def _refuse_mistyped_ends(cluster: Cluster) -> None:
    """A switch that joins nothing else and is named almost like a device was meant to be that device."""
    joined: dict[str, dict[str, Link]] = {}
    for link in cluster.links:
        joined.setdefault(link.src, {}).setdefault(link.dst, link)
        joined.setdefault(link.dst, {}).setdefault(link.src, link)
    for end, others in joined.items():
        if end not in cluster.device_index and len(others) == 1:
            near = difflib.get_close_matches(end, cluster.device_index, n=1, cutoff=_LIKE_A_DEVICE)
            if near:
                (link,) = others.values()
                raise ClusterError(
                    f"link {link.src} -> {link.dst} ends at {end!r}, which is no device and joins nothing else; "
                    f"did you mean {near[0]!r}?"
                )


def _refuse_twice(names: Iterable[str], message: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ClusterError(f"{message} {name!r}; names must be unique.")
        seen.add(name)


def _toml(table: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """The lines of a TOML table: its values, then the tables in it."""
    is_table = {
        key: key != "peak_flops" and isinstance(value[0] if isinstance(value, list) and value else value, Mapping)
        for key, value in table.items()
    }
    for key, value in table.items():
        if not is_table[key] and value != []:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        path = f"{name}.{_key(key)}" if name else _key(key)
        for each in value if isinstance(value, list) and is_table[key] else [value] if is_table[key] else []:
            yield from ("", f"[[{path}]]" if isinstance(value, list) else f"[{path}]")
            yield from _toml(each, path)


def _value(value: Any) -> str:
    if isinstance(value, bool | str):
        return _quoted(value) if isinstance(value, str) else str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return f"[{', '.join(map(_number, value))}]" if isinstance(value, list) else _number(value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _number(value: float) -> str:
    """A number of TOML, as people write it: ``6.7e13``, and neither 67000000000000.0 nor 6.7E+13."""
    if isinstance(value, int):
        return repr(value)
    text = repr(float(value))
    return str(Decimal(text).normalize()).lower().replace("+", "") if text.endswith("000000.0") else text


def _quoted(text: str) -> str:
    """A TOML string. JSON's, but half a surrogate pair is no escape of TOML's, and it escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
