"""The policies by name, each imported when first used: torch takes a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphs.entry_points import Imported

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


POLICIES: Mapping[str, type[PlacementPolicy]] = Imported(_HOME)
