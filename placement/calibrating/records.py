"""Records of a calibration: what was fitted to what, how far off that is, and what stays as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from env.cluster import Cluster
from graphs.formatting import format_seconds, show, show_line
from placement.calibrating.given import KnownStep
from placement.calibrating.kernels import MeasuredKernel

if TYPE_CHECKING:
    from placement.measuring.machine.figures import MeasuredMachine


@dataclass(frozen=True)
class Fit:
    """How far times of one kind of kernel are off, on those that the fit has not seen.

    Attributes:
        what: such as ``"products"``.
        dtype: of all of them.
        fitted, left_out: how many kernels were fitted to, and how many were not.
        before, after: median error of the left out ones by the rates before the fit, and by those after it, as a share
            of what was measured.
    """

    what: str
    dtype: str
    fitted: int
    left_out: int
    before: float
    after: float


@dataclass(frozen=True)
class CheckedStep:
    """A known step, predicted before and after.

    Attributes:
        step: what ran, and its time.
        before_s, after_s: predicted by the cluster before and after the calibration.
    """

    step: KnownStep
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Calibration:
    """A cluster whose figures were measured, and how good they are.

    Attributes:
        cluster: with the new figures.
        kernels: as measured here or read.
        fits: by kind and dtype.
        constants: fitted, by name.
        steps: known ones, if any were given.
        factors: by which known steps made ``compute`` and ``network`` slower; 1 where they did not.
        measured: lines about what was measured.
        kept: what is as it was in the preset, or by data sheet.
        machine: as measured; None where figures came from files.
        wall_s: how long it all took.
    """

    cluster: Cluster
    kernels: tuple[MeasuredKernel, ...] = ()
    fits: tuple[Fit, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[CheckedStep, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    machine: MeasuredMachine | None = field(default=None, repr=False)
    wall_s: float = field(default=0.0, compare=False)

    def headline(self) -> str:
        """How good it is, in a line."""
        products = [fit for fit in self.fits if fit.what == "products"]
        said = [f"products {products[0].after:.1%} off in the median of those left out"] if products else []
        if len(self.steps) == 1 and "kernels" in self.factors:  # it is met by construction: how far off was it?
            said.append(f"by one step kernels take {self.factors['kernels']:.2f} times as long as predicted")
        elif self.steps:
            worst = max(abs(one.after_s / one.step.seconds - 1.0) for one in self.steps)
            said.append(f"known steps at most {worst:.1%} off")
        return f"{show(self.cluster.name)}: {'; '.join(said) or 'measured'}"

    def summary(self) -> str:
        """All of it, for people."""
        return "\n".join([self.headline(), *self._lines()])

    def _lines(self) -> Iterator[str]:
        yield f"source       {show_line(self.cluster.source)}"
        for line in self.measured:
            yield f"measured     {show_line(line)}"
        for fit in self.fits:
            yield (
                f"fit          {fit.what}, {fit.dtype}: {fit.fitted:,} fitted, {fit.left_out:,} left out, of which "
                f"{fit.after:.1%} off in the median (before: {fit.before:.1%})"
            )
        for name, value in self.constants.items():
            yield f"constant     {name} = {value:.4g}"
        for one in self.steps:
            before, after = (s / one.step.seconds - 1.0 for s in (one.before_s, one.after_s))
            yield (
                f"step         {show_line(one.step.text)}: predicted {format_seconds(one.before_s)} before "
                f"({before:+.1%}), {format_seconds(one.after_s)} after ({after:+.1%})"
            )
        for name, factor in self.factors.items():
            yield f"factor       {name} {'take' if name == 'kernels' else 'takes'} {factor:.3f} times as long"
        for line in self.kept:
            yield f"kept         {show_line(line)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "cluster": self.cluster.name,
            "cluster_hash": self.cluster.hash,
            "source": self.cluster.source,
            "kernels": len(self.kernels),
            "fits": [asdict(fit) for fit in self.fits],
            "constants": dict(self.constants),
            "steps": [
                {
                    "step": one.step.text,
                    "measured_s": one.step.seconds,
                    "before_s": one.before_s,
                    "after_s": one.after_s,
                }
                for one in self.steps
            ],
            "factors": dict(self.factors),
            "measured": list(self.measured),
            "kept": list(self.kept),
            "wall_s": self.wall_s,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
