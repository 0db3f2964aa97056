"""`Strategy`: what is done to a graph before it is placed, as a record and as one line of text.

    dp4 zero1 | pp2 1f1b mb8 | tp2 sp | recompute=layers.*

Segments stand between bars. A segment begins with an axis of the mesh and its size, ``pp`` and a number of stages, or
an option; words after it belong to it; patterns and names are joined by ``+``. The order of segments does not matter.
In both, spaces, ``+``, ``|``, ``,`` and ``%`` are written as in addresses of the web: ``%20``, ``%2B`` ...
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any
from urllib.parse import quote

from graphs.disk import plain_reason
from graphs.errors import StrategyError
from graphs.transforms.axes import AXES, GROUPS, STORAGE_AXES
from graphs.transforms.splitting.cuts import Axis

ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "memory", "pipedream")
PLACED = "placed"  # the order of stages that are no stretches of the model: a placement says which ops each has
VIRTUAL = ("interleaved", "zbv", "v-half")  # orders with several stages on each device, two unless the strategy says
STATISTICS = ("exact", "sync", "local")
# Names of all that may live in the memory of the host; parameters with all that an update keeps.
OPTIMIZER, PARAMETERS, ACTIVATIONS = OFFLOADED = "optimizer", "parameters", "activations"
NONE = "none"
_SPECIAL = re.compile(r"[%+|,\s]")  # of a name or pattern: what a line of text would take for its own
_MOST_BUCKET_BYTES = 10**15
AFTER_ALL = 10**12  # bytes of a bucket that is full when all gradients are there


@dataclass(frozen=True)
class MeshRule:
    """One axis of the mesh.

    Attributes:
        name: ``"dp"``, ``"tp"``, ... as in `AXES`.
        size: devices along it.
        sequence: of ``"tp"``: what it leaves whole is cut along the sequence (``sp`` in texts).
        modules: patterns of module paths; empty is the whole model.
        tensor_modules: of ``"dp"``: patterns of module paths whose weights are cut, as along ``"tp"``, where the batch
            of the others is (``tp on`` in texts).
        shares: of ``"dp"``: samples of each replica, in proportion; empty is as many for each.
        by_heads: of ``"cp"``: attention is cut by heads, between two all-to-alls (``ulysses`` in texts); else by its
            queries, which gathers keys and values.
        is_ring: of ``"cp"``: keys and values are not gathered but go round, a block at a time (``ring`` in texts).
        has_experts: of ``"tp"`` and ``"cp"``: experts are spread along it, too (``experts`` in texts), as Megatron-LM's
            are by ``--expert-tensor-parallel-size 1`` and beyond its replicas; else ``"tp"`` cuts their weights.
        once_a_host: of ``"ep"``: a token is sent to a host once, however many of its experts are there (``once`` in
            texts), as by DeepEP and HybridEP; else once for each expert.

    Raises:
        StrategyError: shares that are not one of 1 or more for each part, or not of ``"dp"``; modules whose weights are
            cut along another axis than ``"dp"``, or beside shares.
    """

    name: str
    size: int
    sequence: bool = False
    modules: tuple[str, ...] = ()
    tensor_modules: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    by_heads: bool = False
    is_ring: bool = False
    has_experts: bool = False
    once_a_host: bool = False

    def __post_init__(self) -> None:
        if self.once_a_host and self.name != "ep":
            raise StrategyError(f"axis {self.name}{self.size} has 'once', which is a word of ep.")
        if self.has_experts and self.name not in ("tp", "cp"):
            raise StrategyError(f"axis {self.name}{self.size} has 'experts', which are a word of tp and cp.")
        if self.by_heads and self.name != "cp":
            raise StrategyError(f"axis {self.name}{self.size} cuts attention by heads, which only cp does.")
        if self.is_ring and (self.name != "cp" or self.by_heads):
            said = f"{self.name}{self.size} ring" + (" ulysses" if self.by_heads else "")
            raise StrategyError(f"{said!r} cannot be; expected 'cp{self.size} ring', or 'cp{self.size} ulysses'.")
        if self.tensor_modules and (self.name not in ("dp", GROUPS) or self.shares):
            what = "uneven shares of the batch" if self.shares else "no batch to cut elsewhere"
            raise StrategyError(
                f"axis {self.name}{self.size} cuts weights in {', '.join(self.tensor_modules)} and has {what}; write "
                "for example 'dp4 tp on head'."
            )
        if self.shares and self.name not in ("dp", GROUPS):
            raise StrategyError(f"axis {self.name}{self.size} has shares, which only dp has: those of the batch.")
        if self.shares and (len(self.shares) != self.size or min(self.shares) < 1):
            raise StrategyError(
                f"axis {self.name}{self.size} has shares {self._shares}; expected {self.size} numbers of 1 or more, "
                "one for each replica. To leave a device out, name the others: 'devices=gpu0+gpu1'."
            )

    @property
    def words(self) -> tuple[str, ...]:
        """Dimensions along which it cuts ops whatever their weights are."""
        return (*AXES[self.name].words, *(("sequence",) if self.sequence else ()))

    def axis(self) -> Axis:
        """The axis as `graphs.transforms.splitting.splitter` takes it."""
        words = AXES[self.name].words
        return Axis(
            self.name,
            self.size,
            ("experts", *words) if words and self.has_experts else words,
            self.sequence,
            self.modules,
            self.tensor_modules,
            shares=self.shares,
            by_heads=self.by_heads,
            is_ring=self.is_ring,
            has_experts=self.has_experts,
            once_a_host=self.once_a_host,
        )

    def __str__(self) -> str:
        where = f" on {_joined(self.modules)}" if self.modules else ""
        where += f" tp on {_joined(self.tensor_modules)}" if self.tensor_modules else ""
        shares = f" shares={self._shares}" if self.shares else ""
        known = {"sp": self.sequence, "ulysses": self.by_heads, "ring": self.is_ring}
        known |= {"experts": self.has_experts, "once": self.once_a_host}
        words = "".join(f" {word}" for word, is_said in known.items() if is_said)
        return f"{AXES[self.name].in_text}{self.size}{words}{shares}{where}"

    @property
    def _shares(self) -> str:
        return ":".join(map(str, self.shares))


@dataclass(frozen=True)
class Strategy:
    """A list of transforms, in a form that says each once.

    Attributes:
        mesh: axes of the mesh inside a stage, in the order of `AXES`.
        stages: of a pipeline; 1 for none.
        order: of the micro-batches in the pipeline, a name of `ORDERS`; or `PLACED` (``placed4`` in texts): the stages
            are the devices of a placement, which any op may be on, and the batch is not cut in time.
        chunks: stages of each device, where the order has several (``v2`` in texts).
        micro_batches: into which the batch is cut in time.
        zero: level at which storage is split along `STORAGE_AXES`; 0 for none. Where the mesh has `GROUPS` too, each
            group has a whole of it (hybrid sharding).
        no_sync: of ZeRO 2 and 3 without stages: gradients of micro-batches are added up whole and reduced once, not in
            each micro-batch. In a pipeline they always are, as by torch's schedules.
        recompute: patterns of modules, or ``kind:`` and one of kinds, that run a second time for the backward pass; of
            what is kept all the same, behind ``!`` (`graphs.transforms.recomputing.selecting`).
        offload: what lives in the memory of each device's host, names of `OFFLOADED`: the state of the optimizer, with
            the updates; parameters and gradients as well, which say the former too; all that the forward pass keeps for
            the backward pass, or that of patterns as in `recompute`.
        reduce: algorithm of collectives; "" for the quickest of each on the cluster.
        bucket_bytes: gradients are reduced in buckets of about that size; 0 for one at a time.
        fused_updates: whether parameters whose gradients share a bucket are updated in one launch.
        statistics: of a batch: ``"exact"`` refuses what would change them, ``"sync"`` puts those of all parts together,
            ``"local"`` takes those of each part.
        device_names: of the devices to use, stages first, then the axes of the mesh, ``tp`` innermost; empty for the
            cluster's own, in its order.
        cuts: names of the forward ops with which the second, third ... virtual stage begins; empty for stages that take
            about as long as each other.

    Raises:
        StrategyError: sizes below 1, an unknown name, an order without stages, ZeRO without an axis to split along,
            groups without ZeRO or of unlike replicas, or not as many devices or cuts as the strategy needs, each once.
    """

    mesh: tuple[MeshRule, ...] = ()
    stages: int = 1
    order: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    zero: int = 0
    no_sync: bool = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    reduce: str = ""
    bucket_bytes: int = 25_000_000
    fused_updates: bool = False
    statistics: str = "exact"
    device_names: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ranks = list(AXES)
        object.__setattr__(self, "mesh", tuple(sorted(self.mesh, key=lambda rule: ranks.index(rule.name))))
        if PARAMETERS in self.offload and OPTIMIZER in self.offload:
            object.__setattr__(self, "offload", tuple(name for name in self.offload if name != OPTIMIZER))
        names = [rule.name for rule in self.mesh]
        for name in names:
            if names.count(name) > 1:
                raise StrategyError(
                    f"strategy {self.text!r} has axis {name!r} twice; give each axis once, or of two dp one zero: "
                    "'dp2 | dp8 zero3'."
                )
        sizes = {rule.name: rule.size for rule in self.mesh}
        sizes |= {PLACED if self.is_placed else "pp": self.stages, "mb": self.micro_batches, "v": self.chunks}
        for name, size in sizes.items():
            if size < 1:
                least = 2 if name == PLACED else 1
                raise StrategyError(f"strategy {self.text!r} has {name}{size}; expected {least} or more.")
        if self.zero and self.storage_parts == 1:
            raise StrategyError(
                f"strategy {self.text!r} has zero{self.zero}, which splits storage among replicas, but no dp; write for"
                f" example 'dp4 zero{self.zero}', or, without replicas, 'ep4 zero{self.zero}' or 'cp4 zero{self.zero}'."
            )
        if self.no_sync and not replace(self, no_sync=False).reduces_each:
            raise StrategyError(
                f"strategy {self.text!r} has no_sync, which is of zero2 and zero3 in micro-batches without stages: all "
                "others reduce gradients once; write for example 'dp4 zero3 | mb4 no_sync'."
            )
        self._check_groups(sizes)
        self._check_placed()
        if not 0 <= self.bucket_bytes < _MOST_BUCKET_BYTES:
            raise StrategyError(
                f"a strategy has buckets of {self.bucket_bytes} bytes; expected fewer than {_MOST_BUCKET_BYTES:,}, say "
                "'bucket=25MB'."
            )
        rules = [patterns for rule in self.mesh for patterns in (rule.modules, rule.tensor_modules)]
        if any(pattern in ("", "!") for patterns in (self.recompute, self.offload, *rules) for pattern in patterns):
            raise StrategyError("a strategy has an empty pattern of modules; expected patterns such as 'layers.*'.")
        for key, patterns in (("recompute", self.recompute), ("offload", self.offloaded_activations)):
            if patterns and all(pattern.startswith("!") for pattern in patterns):
                raise StrategyError(
                    f"a strategy has '{key}={_joined(patterns)}', which takes out of nothing; name what it is taken "
                    f"out of, for example '{key}=layers.*+{patterns[0]}'."
                )
        self._check_tensor_modules()
        self._check_names("devices", self.device_names, self.devices)
        self._check_names("cuts", self.cuts, self.virtual_stages - 1)

    def _check_groups(self, sizes: Mapping[str, int]) -> None:
        """Groups of replicas are there for ZeRO, and all alike."""
        if GROUPS not in sizes:
            return
        if "dp" not in sizes:
            raise StrategyError(
                f"a strategy has {sizes[GROUPS]} groups of replicas and no replicas in them; expected for example "
                f"'dp{sizes[GROUPS]} | dp2 zero3'."
            )
        if not self.zero:
            total = sizes[GROUPS] * sizes.get("dp", 1)
            raise StrategyError(
                f"strategy {self.text!r} has two axes dp, which only ZeRO tells apart: the inner one splits storage; "
                f"write 'dp{total}', or for example 'dp{sizes[GROUPS]} | dp{sizes.get('dp', 1)} zero3'."
            )
        rules = [rule for rule in self.mesh if rule.name in (GROUPS, "dp")]
        if any(rule.shares or rule.modules or rule.tensor_modules for rule in rules):
            raise StrategyError(
                f"strategy {self.text!r} has groups of replicas, which are all alike; leave out 'shares=', 'on' and 'tp"
                " on' of both axes dp."
            )

    def _check_placed(self) -> None:
        """A placement is of several devices, in replicas or parts, of the whole batch, and has no stretches."""
        if self.order != PLACED:
            return
        if self.stages == 1 or self.places == 1:
            alone = "has one device for each part, and not two or more"
            wrong = "places no parts of a mesh" if self.places == 1 else alone
            raise StrategyError(
                f"strategy {self.text!r:.200} {wrong}; write for example 'dp2 | placed4', or {NONE!r} for a placement "
                "of the graph as it is."
            )
        if self.micro_batches > 1 or self.chunks > 1 or self.cuts:
            raise StrategyError(
                f"strategy {self.text!r:.200} places the ops of each replica one by one, which leaves no stages to cut "
                "or to run micro-batches through; leave out 'mb', 'v' and 'cuts=', or take a pipeline, 'pp2 1f1b mb8'."
            )

    def _check_tensor_modules(self) -> None:
        """Weights are cut along one axis."""
        if any(rule.tensor_modules for rule in self.mesh) and any(rule.name == "tp" for rule in self.mesh):
            raise StrategyError(
                f"strategy {self.text!r} cuts weights along dp and along tp; write 'tp on' after dp, or an axis tp, not"
                " both."
            )

    def _check_names(self, what: str, names: tuple[str, ...], needed: int) -> None:
        """Each once, and as many as are needed."""
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise StrategyError(f"strategy {self.text!r} has {twice!r} twice among its {what}; give each once.")
        if "" in names:
            raise StrategyError(f"strategy {self.text!r} has an empty name among its {what}; expected names.")
        if names and len(names) != needed:
            given = f"{len(names)} name{'s' if len(names) > 1 else ''} after '{what}='"
            each = "every stage but the first" if what == "cuts" else "each of its parts"
            raise StrategyError(f"strategy {self.text!r} has {given}; expected {needed}, one for {each}.")

    @property
    def is_none(self) -> bool:
        """Whether it leaves the graph as it is."""
        return self == Strategy()

    @property
    def is_placed(self) -> bool:
        """Whether a placement says which op is on which of its stages' devices, for every place of the mesh alike."""
        return self.order == PLACED

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of each micro-batch are reduced, and parts of them added up."""
        return self.zero >= 2 and self.micro_batches > 1 and self.stages == 1 and not self.no_sync

    @property
    def places(self) -> int:
        """Places of the mesh: the devices of each stage."""
        return math.prod(rule.size for rule in self.mesh)

    @property
    def replicas(self) -> int:
        """Replicas of the model, those of all groups."""
        return math.prod(rule.size for rule in self.mesh if rule.name in (GROUPS, "dp"))

    @property
    def is_pipeline(self) -> bool:
        """Whether micro-batches go from stage to stage, which parts that are placed do not."""
        return self.stages > 1 and not self.is_placed

    @property
    def storage_parts(self) -> int:
        """Devices among which ZeRO splits what all of them use whole."""
        return math.prod(rule.size for rule in self.mesh if rule.name in STORAGE_AXES)

    def grouped(self, size: int, zero: int) -> Strategy:
        """The same with ZeRO of a level in groups of so many replicas; among all of them where groups of that size are
        not possible.
        """
        total = self.replicas
        rule = next((rule for rule in self.mesh if rule.name == "dp"), MeshRule("dp", 1))
        is_plain = rule == MeshRule("dp", rule.size)
        if zero and is_plain and 1 < size < total and not total % size:
            rules = [MeshRule(GROUPS, total // size), MeshRule("dp", size)]
        else:
            rules = [replace(rule, size=total)] if total > 1 else []
        others = [other for other in self.mesh if other.name not in (GROUPS, "dp")]
        is_split = any(rule.size > 1 and rule.name in STORAGE_AXES for rule in (*rules, *others))
        return replace(self, mesh=(*rules, *others), zero=zero if is_split else 0)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether updates and the state of the optimizer are on hosts."""
        return OPTIMIZER in self.offload or self.offloads_parameters

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters and their gradients are on hosts, too."""
        return PARAMETERS in self.offload

    @property
    def offloaded_activations(self) -> tuple[str, ...]:
        """`ACTIVATIONS`, and patterns, of what goes to hosts between forward and backward pass."""
        return tuple(name for name in self.offload if name not in (OPTIMIZER, PARAMETERS))

    @property
    def offloaded_states(self) -> tuple[str, ...]:
        """`OPTIMIZER` or `PARAMETERS` where these are on hosts, else nothing."""
        return tuple(name for name in self.offload if name in (OPTIMIZER, PARAMETERS))

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.stages * self.places

    @property
    def virtual_stages(self) -> int:
        """Stages of the pipeline, those of one device counted apart."""
        chunks = 2 if self.chunks == 1 and self.order in VIRTUAL else self.chunks
        return self.stages * chunks if self.stages > 1 else 1

    @cached_property
    def text(self) -> str:
        """One line; `Strategy.parse` gives the strategy back."""
        return " | ".join(self._segments()) or NONE

    def __str__(self) -> str:
        return self.text

    def _segments(self) -> Iterator[str]:
        split = next((name for name in STORAGE_AXES if self.zero and any(rule.name == name for rule in self.mesh)), "")
        for rule in self.mesh:
            if rule.name != "tp":
                yield f"{rule}{f' zero{self.zero}' if rule.name == split else ''}"
        micro, chunks = f"mb{self.micro_batches}", f" v{self.chunks}" * (self.chunks > 1)
        if self.is_placed:
            yield f"{PLACED}{self.stages}{chunks}{f' {micro}' * (self.micro_batches > 1)}"
        elif self.stages > 1 or (self.order, self.chunks) != (Strategy.order, Strategy.chunks):
            yield f"pp{self.stages} {self.order}{chunks} {micro}"
        elif self.micro_batches > 1:
            yield f"{micro}{' no_sync' * self.no_sync}"
        yield from (str(rule) for rule in self.mesh if rule.name == "tp")
        if self.recompute:
            yield f"recompute={_joined(self.recompute)}"
        if self.offload:
            yield f"offload={_joined(self.offload)}"
        if self.reduce:
            yield f"reduce={self.reduce}"
        if self.bucket_bytes != Strategy.bucket_bytes:
            yield f"bucket={self.bucket_bytes}"
        if self.fused_updates:
            yield "updates=fused"
        if self.statistics != Strategy.statistics:
            yield f"statistics={self.statistics}"
        for key, names in (("devices", self.device_names), ("cuts", self.cuts)):
            if names:
                yield f"{key}={_joined(names)}"

    @staticmethod
    def parse(text: str) -> Strategy:
        """Read a line of text.

        Raises:
            StrategyError: it cannot be read; the message shows the place.
        """
        if not isinstance(text, str):
            raise StrategyError(f"got a {type(text).__name__} as a strategy; expected its text, e.g. 'dp8'.")
        from graphs.transforms.strategy_reading import read_strategy  # which needs this module

        return read_strategy(text)

    def to_dict(self) -> dict[str, Any]:
        """The strategy as JSON values, of which `from_dict` makes it again."""
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
            StrategyError: an unknown field, a value of another kind, or what `Strategy` refuses.
        """
        known = [f.name for f in fields(Strategy)]
        for key in values:
            if key not in known:
                raise StrategyError(f"a strategy has unknown field {key!r:.60}; known: {', '.join(known)}.")
        given = dict(values)
        try:
            rules = (dict(rule) for rule in given.pop("mesh", ()))
            mesh = tuple(MeshRule(**_with_tuples(rule, "modules", "tensor_modules", "shares")) for rule in rules)
            return Strategy(mesh=mesh, **_with_tuples(given, "recompute", "offload", "device_names", "cuts"))
        except (TypeError, ValueError) as error:
            raise StrategyError(f"a strategy has a field that is none of its kind: {plain_reason(error)}.") from None


def _joined(names: tuple[str, ...]) -> str:
    return "+".join(_SPECIAL.sub(lambda found: quote(found[0], safe=""), name) for name in names)


def _with_tuples(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """JSON has lists for tuples."""
    return values | {key: tuple(values.get(key, ())) for key in keys}
