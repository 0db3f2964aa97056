"""The policies by name, each imported when first used: torch takes a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from graphs.entry_points import Imported

if TYPE_CHECKING:
    from placement.learning.policies.policy import PlacementPolicy

# name -> module:class. The name is what a policy file says it holds.
_HOME = {
    "hierarchical": "placement.learning.policies.hierarchical:Hierarchical",
    "hierarchical_paper": "placement.learning.policies.published:PaperHierarchical",
    "seq2seq": "placement.learning.policies.published:Seq2Seq",
    "graph": "placement.learning.policies.graph_policy:GraphPolicy",
    "ppo": "placement.learning.policies.ppo_policy:PpoPolicy",
}


POLICIES: Mapping[str, type[PlacementPolicy]] = Imported(_HOME)
GROUP = "placement.policies"  # entry points of other packages, each the name of a policy and its class


def policy_kind(name: str) -> type[PlacementPolicy] | None:
    """The policy of that name: ours, one of another package's entry points, or an imported class; None: none."""
    if name in POLICIES:
        return POLICIES[name]
    for entry in entry_points(group=GROUP, name=name):
        kind: type[PlacementPolicy] = entry.load()
        return kind
    return next((kind for kind in _subclasses() if getattr(kind, "name", None) == name), None)


def _subclasses() -> Iterator[type[PlacementPolicy]]:
    """Classes of policies that are imported, the latest first."""
    from placement.learning.policies.policy import PlacementPolicy  # loads torch

    found: list[type[PlacementPolicy]] = PlacementPolicy.__subclasses__()
    for kind in found:  # grows while it is walked
        found.extend(kind.__subclasses__())
    return reversed(found)
