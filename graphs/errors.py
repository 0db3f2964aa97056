"""Every error this project raises on purpose.

    PlacementError
    ├── GraphError            a graph that is not what it says (also a ValueError)
    │   └── GraphFileError    a graph file that cannot be read
    ├── CaptureError          a model that cannot be traced
    ├── PolicyFileError       a policy file or a checkpoint of a training run that cannot be used (also a ValueError)
    ├── ClusterError          a cluster that is not what it says (also a ValueError)
    ├── UnknownNameError      a model, method, cluster or option that does not exist (also a ValueError)
    ├── MismatchError         a placement for another graph, or not placing every op
    │                         exactly once; a method asked for an objective it does not serve (also a ValueError)
    ├── MethodError           a heuristic of one's own that failed, or returned what is no plan (also a ValueError)
    ├── InfeasibleError       no placement can satisfy memory and pins
    │   └── NotFoundError     none that does was found, which proves nothing
    ├── ConfigurationError    a configuration of a training tool that cannot be read, or that model or cluster
    │                         contradict (also a ValueError)
    ├── BoundError            a lower bound above a value that was reached: one of the two is wrong
    ├── MissingPackageError   an optional package that is needed and not installed (also an ImportError)
    ├── CheckpointError       a file of a run that cannot be written (also an OSError)
    └── RankError             a run on several processes of which one has died, stalled or failed

Each message is one sentence: what was expected, what came, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class PlacementError(Exception):
    """Base of every error raised on purpose. Its message quotes names and values, so it is made safe to show.

    Attributes:
        on_command_line: the sentence with advice for the command line, where the message has some for Python; or empty.
        finished: what was finished of a long piece of work before the error, or None.
        instead: an object like the refused one that would be taken, or None.
    """

    def __init__(self, message: str = "") -> None:
        self.on_command_line = ""
        self.finished: object = None
        self.instead: object = None
        super().__init__(_shown(message))

    def but_on_command_line(self, sentence: str) -> Self:
        """This error, with another sentence for the command line."""
        self.on_command_line = _shown(sentence)
        return self

    def but_take(self, instead: object) -> Self:
        """This error, with what would be taken."""
        self.instead = instead
        return self


def _shown(message: str) -> str:
    from graphs.formatting import show_message  # all modules import this one, few raise anything

    return show_message(message)


class GraphError(PlacementError, ValueError):
    """A graph that breaks a rule of `OpGraph` (cycle, dangling edge, negative size, duplicate name)."""


class GraphFileError(GraphError):
    """A graph file that is truncated, of an unknown version, or not what its name says."""


class CaptureError(PlacementError):
    """A model that could not be traced; the message names the module and the line.

    Attributes:
        reason: the message without the advice.
        way_out: the advice, which the command line words in its own way; empty where the reason says it all.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        self.reason, self.way_out = reason, way_out
        super().__init__(f"{reason}; {way_out}." if way_out else reason)


class PolicyFileError(PlacementError, ValueError):
    """A policy file, or a checkpoint of a training run, that is cut short, of another version, or of another run."""


class ClusterError(PlacementError, ValueError):
    """A cluster that breaks a rule of `Cluster`."""


class MismatchError(PlacementError, ValueError):
    """Things that do not belong together: a placement and a graph or cluster, or a method and an objective."""


class MethodError(PlacementError, ValueError):
    """A heuristic of the user's own that failed, or returned what is no plan of the graph."""


class InfeasibleError(PlacementError):
    """No placement satisfies memory and pins; the message names op, device, bytes needed and bytes free.

    Attributes:
        missing_bytes: what the nearest attempt at a placement was short of on one device; None where there was none.
    """

    def __init__(self, message: str, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class MissingPackageError(PlacementError, ImportError):
    """A package that only some uses need, and that is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed; run `pip install {package}`, or install "
            f"placement with its extra: placement[{package}]."
        )


class NotFoundError(InfeasibleError):
    """A search ended without a placement that satisfies memory and pins; there may be one."""


class BoundError(PlacementError):
    """A lower bound above a value that was reached; the message names the method that gave it."""


class StrategyError(PlacementError):
    """A strategy that cannot be read, or that a graph or a cluster does not allow."""


class ConfigurationError(PlacementError, ValueError):
    """A configuration of a training tool that cannot be read, or that model or cluster contradict; names the line."""


class FitError(PlacementError, ValueError):
    """A method of distributed optimisation that cannot be read, or that model, data or cluster do not allow."""


class CheckpointError(PlacementError, OSError):
    """A file that the processes of a run cannot write, on every one of them; what was there before stays."""


class RankError(PlacementError):
    """A run on several processes that has failed; the message names rank, op and reason."""


class WorkersError(PlacementError):
    """Workers that cannot begin, or are lost; the message says how to do without them."""


class UnknownNameError(PlacementError, ValueError):
    """A name that is not in a registry; the message has the nearest one, and the valid names or where to find them."""

    def __init__(self, what: str, name: str, valid: Iterable[str], listed: str = "") -> None:
        self.what, self.name, self.valid = what, name, tuple(valid)
        plain = {v.casefold(): v for v in reversed(self.valid)}
        asked = str(name).casefold()  # of any value that a caller gave for a name
        near = [v for v in self.valid if asked and v.casefold().startswith(asked)]
        near = near or [plain[v] for v in difflib.get_close_matches(asked, plain, n=1, cutoff=0.6)]
        hint = f", did you mean {near[0]!r}?" if near else "."
        known = f"{listed}." if listed else f"Valid: {', '.join(self.valid) or 'there is none.'}"
        super().__init__(f"unknown {what} {name!r}{hint} {known}")
