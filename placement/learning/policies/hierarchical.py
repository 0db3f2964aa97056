"""`Hierarchical`: a Grouper that puts ops into groups and a Placer that puts groups on devices, learned together.

Shapes: k placements, m groupings, U units (colocation groups and free ops), G groups, D devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from env.plan import Plan
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray
from placement.learning.networks import grouping_kernel as kernel
from placement.learning.networks.placer import Placer, draw, log_prob_entropy
from placement.learning.networks.units import (
    N_FEATURES,
    PerGraph,
    UnitView,
    check_devices,
    coarse_groups,
    correction_of,
    groups_of_plan,
    majority,
    on_devices,
    within_pins,
)
from placement.learning.policies.policy import PlacementPolicy, Proposals

_GROUPINGS = 4  # drawn for one batch of placements
_NEIGHBOURS = 3  # groups next to its own that a unit may change to
_STAY = 6.0  # logit of the group that a unit has
LEVELS = 5  # of priority
_SHIFT = 0.06  # of the longest path: what a level of priority adds
_FIRST_SHARES = (0.25, 0.5)  # of the groups, that the first stages have


@dataclass(frozen=True, eq=False)
class Groupings:
    """m ways to group the units of a problem.

    Attributes:
        group: int64 [m, U].
        sequence: int64 [m, G], groups as they are placed: by their place in the graph, empty ones last.
        used: int64 [m], groups that are not empty.
        seconds, kept, wire_s: [m, G, D], [m, G], [m, G, G], see `grouping_kernel.group_totals`.
        features: float32 [m, G, F], in the order of `sequence`.
        scale_s: what seconds are divided by.
    """

    group: IntArray
    sequence: IntArray
    used: IntArray
    seconds: FloatArray
    kept: FloatArray
    wire_s: FloatArray
    features: Tensor
    scale_s: float


class Hierarchical(PlacementPolicy):
    """Our own version of the hierarchical model.

    Source: A. Mirhoseini et al., "A Hierarchical Model for Device Placement", ICLR 2018: a feed-forward Grouper, and a
    sequence-to-sequence Placer with attention over group embeddings (`PaperHierarchical` keeps to it).
    Beyond the paper, so that it learns faster: features of cost, rank and depth in place of indices; the Grouper
    starts from a coarsening of the graph, and a unit may move to the groups next to its own; the Placer sees what each
    device would mean for the group at hand; it chooses a priority for each group together with the device.
    """

    name: ClassVar[str] = "hierarchical"

    def __init__(self, devices: int, groups: int = 64, hidden: int = 64) -> None:
        """A policy for `devices` devices, with at most `groups` groups and `hidden` units in every layer."""
        super().__init__()
        self.devices, self.groups, self.hidden = devices, groups, hidden
        self.grouper = nn.Sequential(nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Linear(64, hidden))
        self.group_embedding = nn.Parameter(torch.zeros(groups, hidden))
        self.placer = Placer(N_FEATURES + devices + 4, devices, kernel.N_FEATURES, LEVELS, hidden)
        self.partitions, self.corrections = PerGraph(), PerGraph()
        self._views: dict[str, UnitView] = {}
        self._candidates: dict[str, tuple[Tensor, Tensor]] = {}  # of a graph: its partition, and what comes of it

    @classmethod
    def for_problems(cls, problems: Sequence[Problem]) -> Hierarchical:
        devices = problems[0].cluster.n_devices
        return cls(devices, max(64, 12 * devices))

    def config(self) -> dict[str, Any]:
        return {"devices": self.devices, "groups": self.groups, "hidden": self.hidden}

    def check(self, problem: Problem) -> None:
        check_devices(problem, self.devices)

    # -- what it knows of a problem ---------------------------------------------------------------------

    def view(self, problem: Problem) -> UnitView:
        """The features of a problem."""
        key = problem.graph.hash + problem.cluster.hash
        if key not in self._views:
            self._views[key] = UnitView(problem)
        return self._views[key]

    def candidates(self, problem: Problem) -> Tensor:
        """int64 [U, 1 + neighbours]: groups that each unit may be put into, first the one it has; -1 for none."""
        key = problem.graph.hash
        if key not in self.partitions or not self._fits(problem, self.partitions[key]):
            self.regroup(problem, coarse_groups(problem, self.groups))
        partition = self.partitions[key]
        if key not in self._candidates or self._candidates[key][0] is not partition:
            self._candidates[key] = partition, _candidates(self.view(problem), partition.numpy())
        return self._candidates[key][1]

    def _fits(self, problem: Problem, group: Tensor) -> bool:
        """Whether a partition, which may come from a file, is one of this problem."""
        return len(group) == problem.n_units and bool(((group >= 0) & (group < self.groups)).all())

    def regroup(self, problem: Problem, group: IntArray) -> None:
        """Start the groups of a problem afresh from ``group`` int64 [U]."""
        self.partitions[problem.graph.hash] = torch.from_numpy(group)

    def decisions(self, problem: Problem) -> int:
        return len(np.unique(self.candidates(problem)[:, 0].numpy()))

    def refocus(self, problem: Problem, plan: Plan | None, stage: int, rng: np.random.Generator) -> bool:
        """Few groups at first, then more; cut along the best plan, at random, so that no boundary stays for good."""
        share = _FIRST_SHARES[stage] if stage < len(_FIRST_SHARES) else rng.uniform(0.35, 1.0)
        n_groups = max(2, int(self.groups * share))
        if plan is None:
            self.regroup(problem, coarse_groups(problem, n_groups))
        else:
            self.regroup(problem, groups_of_plan(problem, plan, n_groups, rng))
            self.corrections[problem.graph.hash] = torch.from_numpy(correction_of(problem, plan))
        with torch.no_grad():
            self.group_embedding.zero_()
        return True

    # -- the Grouper --------------------------------------------------------------------------------------

    def _group_logits(self, problem: Problem) -> Tensor:
        """float32 [U, 1 + neighbours]."""
        candidates = self.candidates(problem)
        wanted = self.grouper(self.view(problem).features)
        logits = (wanted @ self.group_embedding.T).gather(1, candidates.clamp_min(0))
        stay = functional.pad(torch.tensor([_STAY]), (0, _NEIGHBOURS))
        staying: Tensor = (logits + stay).masked_fill(candidates < 0, -math.inf)
        return staying

    def groupings(self, problem: Problem, choice: Tensor) -> Groupings:
        """The groupings that choices among `candidates`, int64 [m, U], make."""
        view, graph = self.view(problem), problem.graph
        group = self.candidates(problem).expand(len(choice), -1, -1).gather(2, choice.unsqueeze(2)).squeeze(2).numpy()
        structure = (graph.tensor_producer, graph.consumer_ptr, graph.consumers, problem.mean_transfer_s)
        totals = [
            kernel.group_totals(row, problem.unit_of, problem.op_s, graph.kept_bytes, *structure, self.groups)
            for row in group
        ]
        seconds, kept, wire_s = (np.stack(column) for column in zip(*totals, strict=True))
        size = np.stack([np.bincount(row, minlength=self.groups) for row in group])
        position = np.stack([np.bincount(row, view.position, self.groups) for row in group]) / np.maximum(size, 1)
        sequence = np.argsort(np.where(size > 0, position, 2.0), axis=1, kind="stable")
        used = (size > 0).sum(axis=1)
        scale_s = 2 * view.total_s / float(used.max())
        summed = torch.zeros(len(group), self.groups, N_FEATURES).scatter_add_(
            1, torch.from_numpy(group).unsqueeze(2).expand(-1, -1, N_FEATURES), view.features.expand(len(group), -1, -1)
        )
        wires = np.stack([wire_s.sum(axis=1), wire_s.sum(axis=2)], axis=2)
        amounts = np.minimum(np.concatenate([seconds, wires], axis=2) / scale_s, 10.0) / 2
        others = np.stack([np.log1p(size) / 3, np.minimum(kept / max(1, problem.capacity_bytes.max()), 10.0)], axis=2)
        features = torch.cat(
            [
                summed / torch.from_numpy(np.maximum(size, 1)).float().unsqueeze(2),
                torch.from_numpy(np.concatenate([amounts, others], axis=2)).float(),
            ],
            dim=2,
        )
        ordered = features.gather(1, torch.from_numpy(sequence).unsqueeze(2).expand_as(features))
        return Groupings(group, sequence, used, seconds, kept, wire_s, ordered, scale_s)

    # -- PlacementPolicy ------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        self.check(problem)
        m = 1 if greedy else min(_GROUPINGS, count)
        choice = draw(self._group_logits(problem).expand(m, -1, -1), generator, greedy)
        if not greedy:
            choice[0] = 0  # one of them as it stands
        groupings = self.groupings(problem, choice)
        which = torch.arange(count) % m
        rollout = _Rollout(problem, groupings, which.numpy())
        encoded = self.placer.encode(groupings.features[:, : rollout.length])
        device, level = self.placer.decode(encoded[which], rollout.seen, rollout.place, generator, greedy)
        return self._proposals(problem, groupings, choice, which, device, level, torch.from_numpy(rollout.record))

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        choice, which = torch.unique(actions["choice"], dim=0, return_inverse=True)
        groupings = self.groupings(problem, choice)
        device, level, seen = actions["device"], actions["level"], actions["seen"]
        length = device.shape[1]
        encoded = self.placer.encode(groupings.features[:, :length])[which]
        by_device, by_level = self.placer.logits(encoded, self.placer.states(encoded, device), seen)
        some = torch.arange(length) < torch.from_numpy(groupings.used)[which].unsqueeze(1)
        of_device, spread = log_prob_entropy(by_device, device)
        of_level, level_spread = log_prob_entropy(by_level, level)
        of_choice, _ = log_prob_entropy(self._group_logits(problem).expand(len(choice), -1, -1), choice)
        log_prob = ((of_device + of_level) * some).sum(dim=1) + of_choice.sum(dim=1)[which]
        return log_prob, ((spread + 0.3 * level_spread) * some).sum(dim=1) / some.sum(dim=1)

    @torch.no_grad()
    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        """Each group goes where most of its work is in the plan; priorities are the usual ones."""
        count = len(plans)
        units = self.view(problem).units
        groupings = self.groupings(problem, torch.zeros(1, units.n_units, dtype=torch.int64))
        rollout = _Rollout(problem, groupings, np.zeros(count, dtype=np.int64))
        wanted = np.empty((count, self.groups), dtype=np.int64)
        for k, plan in enumerate(plans):
            wanted[k] = majority(problem, groupings.group[0], plan.device, self.groups)[groupings.sequence[0]]
        for t in range(rollout.length):
            rollout.seen(t)
            rollout.place(t, torch.from_numpy(wanted[:, t]))
        device = torch.from_numpy(wanted[:, : rollout.length].copy())
        return {
            "choice": torch.zeros(count, units.n_units, dtype=torch.int64),
            "device": device,
            "level": torch.full_like(device, LEVELS // 2),
            "seen": torch.from_numpy(rollout.record),
        }

    def _proposals(
        self, problem: Problem, groupings: Groupings, choice: Tensor, which: Tensor, device: Tensor, level: Tensor,
        seen: Tensor,
    ) -> Proposals:  # fmt: skip
        row = which.numpy()[:, np.newaxis]
        by_group = np.zeros((2, len(device), self.groups), dtype=np.int64)
        sequence = groupings.sequence[which.numpy()][:, : device.shape[1]]
        np.put_along_axis(by_group[0], sequence, device.numpy(), axis=1)
        np.put_along_axis(by_group[1], sequence, level.numpy() - LEVELS // 2, axis=1)
        of_op = groupings.group[:, problem.unit_of][row[:, 0]]
        placed = np.take_along_axis(by_group[0], of_op, axis=1)
        shift_s = np.take_along_axis(by_group[1], of_op, axis=1) * (_SHIFT * self.view(problem).rank_s.max())
        key = problem.graph.hash
        if key in self.corrections and len(self.corrections[key]) == problem.graph.n_ops:
            shift_s += self.corrections[key].numpy()
        placed = within_pins(problem, placed)
        return Proposals(placed, on_devices(problem, placed, shift_s), {
            "choice": choice[which], "device": device, "level": level, "seen": seen,
        })  # fmt: skip


class _Rollout:
    """k placements in the making, and the features of the devices at each step."""

    def __init__(self, problem: Problem, groupings: Groupings, which: IntArray) -> None:
        k, (_, n_groups, n_devices) = len(which), groupings.seconds.shape
        self.length = int(groupings.used.max())
        self.record = np.zeros((k, self.length, n_devices, kernel.N_FEATURES), dtype=np.float32)
        self._step = np.empty((k, n_devices, kernel.N_FEATURES), dtype=np.float32)
        self._groups = (which, groupings.sequence, groupings.seconds, groupings.kept, groupings.wire_s)
        self._scale = (np.maximum(problem.capacity_bytes, 1).astype(np.float64), groupings.scale_s)
        self._state = (np.zeros((k, n_groups), dtype=np.int64), np.zeros((k, n_groups)), *np.zeros((3, k, n_devices)))

    def seen(self, t: int) -> Tensor:
        """float32 [k, D, X], before group t is placed."""
        kernel.device_features(t, *self._groups, *self._scale, *self._state, self._step)  # type: ignore[call-arg]
        self.record[:, t] = self._step
        return torch.from_numpy(self.record[:, t])

    def place(self, t: int, chosen: Tensor) -> None:
        """Group t goes to ``chosen`` int64 [k]."""
        kernel.place(t, chosen.numpy(), *self._groups, *self._state)


def _candidates(view: UnitView, group: IntArray) -> Tensor:
    """int64 [U, 1 + neighbours]: the group of each unit and those of its heaviest neighbours."""
    rows = [[g] for g in group.tolist()]
    source, target, _ = view.links
    for unit, g in zip(source.tolist(), group[target].tolist(), strict=True):
        if len(rows[unit]) <= _NEIGHBOURS and g not in rows[unit]:
            rows[unit].append(g)
    return torch.tensor([row + [-1] * (1 + _NEIGHBOURS - len(row)) for row in rows])
