"""Lower bounds on the largest load that hold whatever communication costs."""

from __future__ import annotations

import numpy as np

from env.bounds.area import Work


def largest_unit_s(work: Work) -> float:
    """Seconds of the largest unit of placement on its fastest allowed device: one device must do it all. O(n K)."""
    seconds = np.column_stack([np.bincount(work.unit_of, column, work.n_units) for column in work.seconds.T])
    return float(seconds.min(axis=1).max())
