"""Progress of a measurement, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.processes.starting import StepProgress

_LONG_S = 30.0  # what is measured longer than this is said, also where no bar is shown


def tell_steps(
    bar: Callable[[str, int], None], model: str, dims: dict[str, int]
) -> Callable[[str, StepProgress], None]:
    """A function that shows how far the steps of something are, and says beforehand where they take long."""
    announced: set[tuple[str, bool]] = set()

    def tell(what: str, now: StepProgress) -> None:
        from graphs.formatting import format_seconds

        is_first = now.done == 0
        each = f"{format_seconds(now.step_s)} {'predicted for each' if is_first else 'each'}"
        bar(f"running {what}: step {now.done} of about {now.expected}, {each}", now.done)
        left_s = (now.expected - now.done) * now.step_s
        if (what, is_first) not in announced and left_s > _LONG_S:
            announced.add((what, is_first))
            takes = "is predicted to take" if is_first else "takes"
            fewer = "" if dims or ":" in model else "; --dim batch=N takes N samples in place of the model's own number"
            warnings.warn(
                f"a step of {what} {takes} {format_seconds(now.step_s)}, and about {now.expected - now.done} "
                f"{'' if is_first else 'more '}are run, in {format_seconds(left_s)}{fewer}.",
                stacklevel=1,
            )

    return tell
