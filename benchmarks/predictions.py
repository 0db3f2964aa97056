"""What the pages of predicted and measured step times share: errors, their summary, order, and what is not modelled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

LARGE = 0.2  # an error that a page names
LEFT_OUT = (
    "Not in the model: the copy that a sender makes of each tensor, with its own core; what a process does in each "
    "step around the code of its ops (taking inputs, handing gradients over); and that a core is faster while the "
    "other one rests, since ops are measured on both at once."
)

Row = dict[str, Any]


def error(row: Row) -> float:
    """Of a row that was run: below 0 where the prediction is too fast."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def summary(rows: Sequence[Row]) -> str:
    """Of rows that were run."""
    errors = [abs(error(row)) for row in rows]
    return f"the prediction is off by {statistics.median(errors):.1%} in the median and {max(errors):.1%} at most"


def tau(rows: Sequence[Row], digits: int = 3) -> float:
    """Kendall's tau-b of rows that were run; predictions equal in so many digits are ties."""
    from scipy.stats import kendalltau

    predicted = [float(f"{row['predicted_s']:.{digits}g}") for row in rows]
    return float(kendalltau(predicted, [row["measured_s"] for row in rows]).statistic)


def ends(rows: Sequence[Row], what: str) -> list[str]:
    """The last lines of a page, by the rows that were run: the large errors, each by name, and what is not modelled.

    Args:
        what: the key of a row that says what was run of its model.
    """
    large = [row for row in rows if abs(error(row)) > LARGE]
    named = ", ".join(f"{row['model']} {row[what]} {error(row):+.1%}" for row in large).replace(" | ", "; ")
    return [
        "## What is off, and what is not modelled",
        "",
        f"Off by more than {LARGE:.0%}: {named or 'none'}.",
        "",
        LEFT_OUT,
        "",
    ]
