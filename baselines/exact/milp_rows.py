"""A mixed-integer programme, grown column by column and row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Terms = list[tuple[int, float]]  # (column, coefficient) pairs


@dataclass
class MilpRows:
    """Columns between 0 and ``upper`` with a value in the solution to start from; rows in CSR form."""

    upper: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_ptr: list[int] = field(default_factory=lambda: [0])
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add_column(self, warm: float, upper: float = 1.0) -> int:
        """Its number."""
        self.upper.append(upper)
        self.warm.append(float(warm))
        return len(self.warm) - 1

    def add(self, *terms: Terms, lower: float = -np.inf, upper: float = np.inf) -> None:
        """A row: ``lower <= sum of all terms <= upper``; no column twice."""
        for column, value in (term for part in terms for term in part):
            self.column.append(column)
            self.value.append(value)
        self.row_ptr.append(len(self.column))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
