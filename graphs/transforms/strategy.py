"""`Strategy`: what is done to a graph before it is placed, as a record and as one line of text.

    dp4 zero1 | pp2 1f1b mb8 | tp2 sp | recompute=layers.*

Segments stand between bars. A segment begins with an axis of the mesh and its size, ``pp`` and a number of stages, or
an option; words after it belong to it; patterns are joined by ``+``. The order of segments does not
matter.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from graphs.disk import plain_reason
from graphs.errors import StrategyError
from graphs.transforms.collectives.rounds import ALGORITHMS, is_algorithm
from graphs.transforms.splitting.sharding import Axis

# Axes of a mesh, outermost first, and the words of the rows that each takes; none for cutting weights.
AXES: Mapping[str, tuple[str, ...]] = {
    "dp": ("batch",),
    "ep": ("experts",),
    "cp": ("sequence",),
    "hp": ("height",),
    "wp": ("width",),
    "tp": (),
}
AXIS_NAMES = {
    "dp": "data parallelism",
    "ep": "expert parallelism",
    "cp": "context parallelism, along the sequence",
    "hp": "spatial parallelism along the height",
    "wp": "spatial parallelism along the width",
    "tp": "tensor parallelism",
}
ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "memory", "pipedream")
STATISTICS = ("exact", "sync", "local")
NONE = "none"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


@dataclass(frozen=True)
class MeshRule:
    """One axis of the mesh.

    Attributes:
        name: ``"dp"``, ``"tp"``, ... as in `AXES`.
        size: devices along it.
        sequence: of ``"tp"``: what it leaves whole is cut along the sequence (``sp`` in texts).
        modules: patterns of module paths; empty is the whole model.
    """

    name: str
    size: int
    sequence: bool = False
    modules: tuple[str, ...] = ()

    def axis(self) -> Axis:
        """What `graphs.transforms.splitting.splitter` is told."""
        return Axis(self.name, self.size, AXES[self.name], self.sequence, self.modules)

    def __str__(self) -> str:
        where = f" on {'+'.join(self.modules)}" if self.modules else ""
        return f"{self.name}{self.size}{' sp' if self.sequence else ''}{where}"


@dataclass(frozen=True)
class Strategy:
    """A list of transforms, in a form that says each once.

    Attributes:
        mesh: axes of the mesh inside a stage, in the order of `AXES`.
        stages: of a pipeline; 1 for none.
        order: of the micro-batches in the pipeline, a name of `ORDERS`.
        chunks: stages of each device, where the order has several (``v2`` in texts).
        micro_batches: into which the batch is cut in time.
        zero: level at which storage is split along ``dp``; 0 for none.
        recompute: patterns of modules, or ``kind:`` and one of kinds, that run a second time for the backward pass.
        reduce: algorithm of collectives; "" for the quickest of each on the cluster.
        bucket_bytes: gradients are reduced in buckets of about that size; 0 for one at a time.
        statistics: of a batch: ``"exact"`` refuses what would change them, ``"sync"`` puts those of all parts together,
            ``"local"`` takes those of each part.

    Raises:
        StrategyError: sizes below 1, an unknown name, an order without stages, or ZeRO without ``dp``.
    """

    mesh: tuple[MeshRule, ...] = ()
    stages: int = 1
    order: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    zero: int = 0
    recompute: tuple[str, ...] = ()
    reduce: str = ""
    bucket_bytes: int = 25_000_000
    statistics: str = "exact"

    def __post_init__(self) -> None:
        ranks = list(AXES)
        object.__setattr__(self, "mesh", tuple(sorted(self.mesh, key=lambda rule: ranks.index(rule.name))))
        names = [rule.name for rule in self.mesh]
        for name in names:
            if names.count(name) > 1:
                raise StrategyError(f"strategy {self.text!r} has axis {name!r} twice; give each axis once.")
        sizes = {rule.name: rule.size for rule in self.mesh}
        sizes |= {"pp": self.stages, "mb": self.micro_batches, "v": self.chunks}
        for name, size in sizes.items():
            if size < 1:
                raise StrategyError(f"strategy {self.text!r} has {name}{size}; expected 1 or more.")
        if self.zero and not sizes.get("dp", 1) > 1:
            raise StrategyError(
                f"strategy {self.text!r} has zero{self.zero}, which splits storage among replicas, but no dp; write for"
                f" example 'dp4 zero{self.zero}'."
            )

    @property
    def is_none(self) -> bool:
        """Whether it leaves the graph as it is."""
        return self == Strategy()

    @property
    def places(self) -> int:
        """Of the mesh: how many devices each stage has."""
        return math.prod(rule.size for rule in self.mesh)

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.stages * self.places

    @property
    def text(self) -> str:
        """One line; `Strategy.parse` gives the strategy back."""
        return " | ".join(self._segments()) or NONE

    def __str__(self) -> str:
        return self.text

    def _segments(self) -> Iterator[str]:
        for rule in self.mesh:
            if rule.name != "tp":
                yield f"{rule}{f' zero{self.zero}' if rule.name == 'dp' and self.zero else ''}"
        micro = f"mb{self.micro_batches}"
        if self.stages > 1:
            chunks = f" v{self.chunks}" if self.chunks > 1 else ""
            yield f"pp{self.stages} {self.order}{chunks} {micro}"
        elif self.micro_batches > 1:
            yield micro
        yield from (str(rule) for rule in self.mesh if rule.name == "tp")
        if self.recompute:
            yield f"recompute={'+'.join(self.recompute)}"
        if self.reduce:
            yield f"reduce={self.reduce}"
        if self.bucket_bytes != Strategy.bucket_bytes:
            yield f"bucket={self.bucket_bytes}"
        if self.statistics != Strategy.statistics:
            yield f"statistics={self.statistics}"

    @staticmethod
    def parse(text: str) -> Strategy:
        """Read a line of text.

        Raises:
            StrategyError: it cannot be read; the message shows the place.
        """
        if not isinstance(text, str):
            raise StrategyError(f"got a {type(text).__name__} as a strategy; expected its text, e.g. 'dp8'.")
        return _Reader(text).strategy()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `from_dict` gives the strategy back."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict` as JSON text; `from_json` gives the strategy back."""
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Strategy:
        """The inverse of `to_json`.

        Raises:
            StrategyError: no JSON object, or as `from_dict`.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise StrategyError(f"a strategy is not JSON: {plain_reason(error)}.") from None
        if not isinstance(values, dict):
            raise StrategyError(f"a strategy is {type(values).__name__} in JSON; expected an object.")
        return Strategy.from_dict(values)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Strategy:
        """The inverse of `to_dict`.

        Raises:
            StrategyError: an unknown field, or what `Strategy` refuses.
        """
        known = [f.name for f in fields(Strategy)]
        for key in values:
            if key not in known:
                raise StrategyError(f"a strategy has unknown field {key!r:.60}; known: {', '.join(known)}.")
        given = dict(values)
        rules = (dict(rule) for rule in given.pop("mesh", ()))
        mesh = tuple(MeshRule(**{**rule, "modules": tuple(rule.get("modules", ()))}) for rule in rules)
        return Strategy(mesh=mesh, **{**given, "recompute": tuple(given.get("recompute", ()))})


_WORD = re.compile(r"[^\s|]+|\|")
_SIZED = re.compile(r"([a-z]+)(\d{1,9})")


@dataclass(frozen=True)
class _Reader:
    """Reads words one after the other and knows where it is, and what has been said."""

    text: str
    said: set[str] = field(default_factory=set)

    def strategy(self) -> Strategy:
        result = Strategy()
        if self.text.strip() == NONE:
            return result
        segments: list[list[re.Match[str]]] = [[]]
        for word in _WORD.finditer(self.text):
            if word[0] == "|":
                segments.append([])
            else:
                segments[-1].append(word)
        for words in segments:
            if not words:
                raise StrategyError(
                    f"strategy {self.text!r:.200} has an empty segment; expected for example 'dp8', 'dp4 zero1 | tp2' "
                    f"or 'pp4 1f1b mb8', and {NONE!r} for none."
                )
            result = self._segment(result, words)
        return result

    def _segment(self, strategy: Strategy, words: list[re.Match[str]]) -> Strategy:
        first, rest = words[0], iter(words[1:])
        name, size = self._sized(first)
        if name in AXES:
            return self._axis(strategy, MeshRule(name, size), rest)
        if name == "pp":
            self._once(first, "stages")
            return self._pipeline(replace(strategy, stages=size), rest)
        if name == "mb":
            self._once(first, "micro-batches")
            strategy = replace(strategy, micro_batches=size)
        elif "=" in first[0]:
            strategy = self._option(strategy, first)
        else:
            raise self._unknown(first, [*(f"{axis}2" for axis in AXES), "pp2", "mb8", "recompute=*", "reduce=ring"])
        for word in rest:
            raise self._unknown(word, ["|"])
        return strategy

    def _axis(self, strategy: Strategy, rule: MeshRule, rest: Iterator[re.Match[str]]) -> Strategy:
        zero = strategy.zero
        for word in rest:
            name, size = self._sized(word)
            if name == "zero" and rule.name == "dp" and 1 <= size <= 3:
                self._once(word, "a level of ZeRO")
                zero = size
            elif word[0] == "sp" and rule.name == "tp":
                rule = replace(rule, sequence=True)
            elif word[0] == "on":
                where = next(rest, None)
                if where is None:
                    raise self._unknown(word, ["on layers.*.mlp"])
                self._once(word, f"modules of {rule.name}")
                rule = replace(rule, modules=tuple(where[0].split("+")))
            else:
                options = {"dp": ["zero1", "zero2", "zero3", "on"], "tp": ["sp", "on"]}.get(rule.name, ["on"])
                raise self._unknown(word, options)
        return replace(strategy, mesh=(*strategy.mesh, rule), zero=zero)

    def _pipeline(self, strategy: Strategy, rest: Iterator[re.Match[str]]) -> Strategy:
        for word in rest:
            name, size = self._sized(word)
            if word[0] in ORDERS:
                self._once(word, "an order")
                strategy = replace(strategy, order=word[0])
            elif name == "mb":
                self._once(word, "micro-batches")
                strategy = replace(strategy, micro_batches=size)
            elif name == "v":
                self._once(word, "virtual stages")
                strategy = replace(strategy, chunks=size)
            else:
                raise self._unknown(word, [*ORDERS, "mb8", "v2"])
        return strategy

    def _option(self, strategy: Strategy, word: re.Match[str]) -> Strategy:
        key, _, value = word[0].partition("=")
        self._once(word, key)
        if key == "recompute" and value:
            return replace(strategy, recompute=tuple(value.split("+")))
        if key == "reduce" and is_algorithm(value):
            return replace(strategy, reduce=value)
        if key == "statistics" and value in STATISTICS:
            return replace(strategy, statistics=value)
        found = re.fullmatch(r"(\d{1,12})(KB|MB|GB|)", value)
        if key == "bucket" and found:
            return replace(strategy, bucket_bytes=int(found[1]) * _UNITS[found[2]])
        names = [f"reduce={name}" for name in ALGORITHMS] + [f"statistics={name}" for name in STATISTICS]
        raise self._unknown(word, ["recompute=layers.*", *names, "bucket=25MB"])

    def _once(self, word: re.Match[str], what: str) -> None:
        """Of two answers to one question the second would silently win."""
        if what in self.said:
            raise StrategyError(
                f"strategy {self.text!r:.200} gives {what} twice, the second time at {word[0]!r:.60} (character "
                f"{word.start() + 1}); give it once."
            )
        self.said.add(what)

    def _sized(self, word: re.Match[str]) -> tuple[str, int]:
        found = _SIZED.fullmatch(word[0])
        return (found[1], int(found[2])) if found else ("", 0)

    def _unknown(self, word: re.Match[str], expected: list[str]) -> StrategyError:
        name, size = self._sized(word)
        if size and name in (*AXES, "pp", "mb") and expected != ["|"]:
            expected = [f"| {word[0]}", *expected]
        near = difflib.get_close_matches(word[0], expected, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        return StrategyError(
            f"strategy {self.text!r:.200} cannot be read at {word[0]!r:.60} (character {word.start() + 1}){hint} "
            f"expected {' or '.join(expected[:12])}."
        )
