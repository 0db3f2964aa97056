"""Sentences about methods whose parts do not go together, or whose numbers are out of range."""

from __future__ import annotations

from placement.fitting.arrivals import WaitForAll
from placement.fitting.compressions.uncompressed import Uncompressed
from placement.fitting.role import MethodParts


def first_of(*sentences: str | None) -> str | None:
    """The first sentence that there is."""
    return next((sentence for sentence in sentences if sentence is not None), None)


def below(option: str, value: float, least: float) -> str | None:
    """A refusal of a value below the least one; `option` is the text up to the value."""
    return None if value >= least else f"{option}={value} is out of range; choose {least} or more."


def outside(option: str, value: float, least: float, most: float) -> str | None:
    """A refusal of a value that is not from `least` to `most`."""
    if least <= value <= most:
        return None
    return f"{option}={value} is out of range; choose a value from {least} to {most}."


def with_arrival_rule(name: str, method: MethodParts) -> str | None:
    """A refusal where the exchange has no server that an arrival rule could steer."""
    if type(method.arrival) is WaitForAll:
        return None
    return f"{name} takes no arrival rule; leave it out, or choose parameter_server, which has one."


def with_compression(name: str, method: MethodParts) -> str | None:
    """A refusal where the exchange sends whole weights, which a compression of gradients would spoil."""
    if isinstance(method.compression, Uncompressed):
        return None
    return f"{name} sends weights, not gradients, and cannot compress them; leave the compression out."
