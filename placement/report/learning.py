"""The curve of a training run, as an SVG file that stands alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from placement.report.curves import Curve, evenly, plot
from placement.report.paper import drawings

if TYPE_CHECKING:
    from placement.learning.training import Training

_COLOURS = 8  # of the style sheet


def learning_curve(found: Training) -> str:
    """The best step time of each problem so far over its lower bound, by the placements that were scored."""
    curves = []
    for number, (label, bound_s) in enumerate(zip(found.labels, found.lower_bounds_s, strict=True)):
        points, best = list[tuple[float, float]](), math.inf
        for point in found.curve:
            if point.problem == number and point.best_s < best and bound_s > 0:
                points += [(point.samples, best / bound_s)] if points else []  # a step, where it was found
                best = point.best_s
                points.append((point.samples, best / bound_s))
        points += [(found.samples, points[-1][1])] if points else []
        curves.append(Curve(f"{label}, over its lower bound", f"c{number % _COLOURS}", points))
    across = evenly(max(found.samples, 1), "placements", "{:,.0f}".format)
    (drawing,) = drawings(plot(curves, across, "{:.2f}×".format)).values()
    return drawing
