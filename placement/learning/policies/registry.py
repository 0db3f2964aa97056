"""The policies by name, each imported when first used: torch takes a while."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placement.learning.policies.policy import PlacementPolicy

# name -> module:class. The name is what a policy file says it holds.
_HOME = {
    "hierarchical": "placement.learning.policies.hierarchical:Hierarchical",
    "hierarchical_paper": "placement.learning.policies.hierarchical_paper:PaperHierarchical",
    "seq2seq": "placement.learning.policies.seq2seq:Seq2Seq",
    "graph": "placement.learning.policies.graph_policy:GraphPolicy",
    "ppo": "placement.learning.policies.ppo_policy:PpoPolicy",
}


class _Policies(Mapping[str, "type[PlacementPolicy]"]):
    def __getitem__(self, name: str) -> type[PlacementPolicy]:
        found: type[PlacementPolicy] = imported(_HOME[name])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


POLICIES: Mapping[str, type[PlacementPolicy]] = _Policies()


def imported(home: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
