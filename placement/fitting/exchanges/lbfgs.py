"""L-BFGS on vectors that lie on servers, in dot products, sums and scalings alone."""

from __future__ import annotations

from placement.fitting.exchanges.vectors import GRADIENT, HISTORY, VectorShards
from placement.fitting.requests import Participant

# Below it, s . y says nothing about the curvature (torch.optim.LBFGS).
_LEAST_CURVATURE = 1e-10
_DIRECTION, _LAST_GRADIENT, _PAIRS = HISTORY, HISTORY + 1, HISTORY + 2


class LimitedMemory:
    """As `torch.optim.LBFGS` without line search, one iteration for each update (Nocedal and Wright, algorithm 7.5).

    Where torch would end, since the direction does not go downhill, this forgets its history and begins anew.
    """

    def __init__(self, vectors: VectorShards, history: int, learning_rate: float) -> None:
        self._vectors, self._learning_rate = vectors, learning_rate
        self._step = 0.0  # the last one, in directions; 0: none, or nothing is remembered
        self._scale = 1.0  # the inverse Hessian matrix before the pairs
        # Pairs (s, y): a step, and by what it changed the gradient. One is kept free for the next.
        self._free = [(_PAIRS + 2 * place, _PAIRS + 2 * place + 1) for place in range(history + 1)]
        self._pairs: list[tuple[int, int, float]] = []  # the oldest first, with 1 / (s . y)

    def update(self) -> Participant:
        """One update by the gradient that is there."""
        vectors = self._vectors
        if self._step:
            yield from self._remember()
        yield from self._aim()
        if (yield from vectors.dot(GRADIENT, _DIRECTION)) >= 0 and self._pairs:
            self._free += [(s, y) for s, y, _ in self._pairs]
            self._pairs, self._scale, self._step = [], 1.0, 0.0
            yield from self._aim()
        if self._step:
            self._step = self._learning_rate
        else:
            norm = yield from vectors.norm1(GRADIENT)
            self._step = self._learning_rate * min(1.0, 1.0 / norm if norm else 1.0)
        yield from vectors.copy(_LAST_GRADIENT, GRADIENT)
        yield from vectors.step(self._step, _DIRECTION)

    def _remember(self) -> Participant:
        """The pair of the last step, unless it says nothing."""
        vectors, (s, y) = self._vectors, self._free[-1]
        yield from vectors.copy(s, _DIRECTION)
        yield from vectors.scale(s, self._step)
        yield from vectors.copy(y, GRADIENT)
        yield from vectors.add(y, -1.0, _LAST_GRADIENT)
        curvature = yield from vectors.dot(s, y)
        if curvature > _LEAST_CURVATURE:
            self._free.pop()
            self._pairs.append((s, y, 1.0 / curvature))
            self._scale = curvature / (yield from vectors.dot(y, y))
            if not self._free:
                oldest_s, oldest_y, _ = self._pairs.pop(0)
                self._free.append((oldest_s, oldest_y))

    def _aim(self) -> Participant:
        """The direction: minus the inverse Hessian matrix times the gradient, by the two loops."""
        vectors, factors = self._vectors, []
        yield from vectors.copy(_DIRECTION, GRADIENT)
        yield from vectors.scale(_DIRECTION, -1.0)
        for s, y, inverse in reversed(self._pairs):
            factors.append(inverse * (yield from vectors.dot(s, _DIRECTION)))
            yield from vectors.add(_DIRECTION, -factors[-1], y)
        if self._pairs:
            yield from vectors.scale(_DIRECTION, self._scale)
        for (s, y, inverse), factor in zip(self._pairs, reversed(factors), strict=True):
            other = inverse * (yield from vectors.dot(y, _DIRECTION))
            yield from vectors.add(_DIRECTION, factor - other, s)
