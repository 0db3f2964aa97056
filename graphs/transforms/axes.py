"""`AXES`: the axes of a mesh, each a way to run one step on several devices. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisKind:
    """A parallelism within a stage.

    Attributes:
        name: of an axis of the mesh, ``"dp"``.
        words: axes of split rows that it takes, the first that an op has; none for one that cuts weights.
        label: the noun, as errors say it.
        brief: the adjective, as answers say it: "data parallel" on 4.
        cuts: the object that is split, as drawings say it.
        family: name of the strategies that use this axis alone (`baselines.strategies.searching.families`).
        needs: axis of split rows without which a graph cannot use it; "" for none beyond `words`.
        shares_states: devices along it keep parts of the weights.
        splits_storage: devices along it have other data and, of what it does not cut, the same weights: ZeRO keeps one
            of them in all of these devices together.
        in_torch: torch and the training frameworks have a module or a setting for it.
        written: in texts of strategies, where it is another word than `name`.
    """

    name: str
    words: tuple[str, ...]
    label: str
    brief: str
    cuts: str
    family: str
    needs: str = ""
    shares_states: bool = False
    splits_storage: bool = False
    in_torch: bool = False
    written: str = ""

    @property
    def in_text(self) -> str:
        """Word of texts, ``"dp"`` in ``dp4``."""
        return self.written or self.name

    def limit(self, extents: Mapping[str, int]) -> int:
        """The most parts of a graph along it; 1 where it has none.

        Args:
            extents: units that the graph's rows have along each word.
        """
        if self.needs and self.needs not in extents:
            return 1
        words = self.words or extents.keys() - {"batch", "sequence"}
        return max((extents.get(word, 1) for word in words), default=1)


GROUPS = "rp"  # the outer one of two axes ``dp`` in a text: along it stand groups, in each of which ZeRO splits storage

# In the order of a mesh, outermost first.
AXES: Mapping[str, AxisKind] = {
    axis.name: axis
    for axis in (
        AxisKind(
            GROUPS,
            ("batch",),
            "groups of replicas",
            "groups of replicas",
            "the batch, a part for each group of replicas",
            family="dp",
            in_torch=True,
            written="dp",
        ),
        AxisKind(
            "dp",
            ("batch",),
            "data parallelism",
            "data parallel",
            "the batch, a part for each replica",
            family="dp",
            splits_storage=True,
            in_torch=True,
        ),
        AxisKind(
            "ep",
            ("experts", "batch"),
            "expert parallelism",
            "expert parallel",
            "the experts of each layer",
            family="ep",
            needs="experts",
            shares_states=True,
            splits_storage=True,
        ),
        AxisKind(
            "cp",
            ("sequence",),
            "context parallelism, along the sequence",
            "context parallel",
            "the sequence",
            family="cp",
            splits_storage=True,
        ),
        AxisKind(
            "hp",
            ("height",),
            "spatial parallelism along the height",
            "images cut by height",
            "the height of images",
            family="spatial",
        ),
        AxisKind(
            "wp",
            ("width",),
            "spatial parallelism along the width",
            "images cut by width",
            "the width of images",
            family="spatial",
        ),
        AxisKind(
            "tp",
            (),
            "tensor parallelism",
            "tensor parallel",
            "weights, by heads, features, channels or vocabulary",
            family="tp",
            shares_states=True,
            in_torch=True,
        ),
    )
}
STORAGE_AXES = tuple(name for name, axis in AXES.items() if axis.splits_storage)
