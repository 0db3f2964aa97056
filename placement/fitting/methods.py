"""A method of distributed optimisation as one line of text: parts joined by ``+``, each with its options.

``sync``, ``local_sgd:period=8``, ``downpour:fetch=5+adagrad``, ``qsgd:s=16+momentum:momentum=0.9+lr=0.05``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from graphs.errors import FitError, UnknownNameError
from graphs.formatting import counted
from placement.fitting.arrivals import WaitForAll
from placement.fitting.exchanges.sandblaster import Sandblaster
from placement.fitting.exchanges.servers import ParameterServer
from placement.fitting.participants import ArrivalRule, BatchRule, Compression, ExchangeRule
from placement.fitting.registry import NAMES, PARTS

_LEARNING_RATE = "lr"
_MOST = 1_000_000  # of shards, steps, kept pairs and the like


@dataclass(frozen=True)
class FitMethod:
    """A method of distributed optimisation: four parts that may be exchanged one by one.

    Attributes:
        exchange, compression, batch_rule, arrival: the parts.
        learning_rate: the one that is right for the batch of one worker; None: the run's own.
        name: what it is called, the text that it was read from; else `text`.
    """

    exchange: ExchangeRule
    compression: Compression
    batch_rule: BatchRule
    arrival: ArrivalRule
    learning_rate: float | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.text)

    @classmethod
    def parse(cls, text: str) -> FitMethod:
        """The method that a text names. An arrival rule without an exchange means a parameter server.

        Raises:
            UnknownNameError: a part that there is not.
            FitError: two parts of one kind, an option that the part does not have, or a value that is none.
        """
        made: dict[str, Any] = {}
        for word in (each.strip() for each in text.split("+")):
            name, *options = word.split(":")
            if name.startswith(f"{_LEARNING_RATE}="):
                if "learning_rate" in made:
                    raise FitError(f"method {text!r} names two learning rates; leave one out.")
                rate = made["learning_rate"] = _number(name.partition("=")[2], float, name, text)
                if not rate >= 0:
                    raise FitError(f"method {text!r}: {_LEARNING_RATE} is {rate:g}; expected a number, 0 or more.")
                continue
            kind = next((kind for kind, (known, _) in PARTS.items() if name in known), None)
            if kind is None:
                raise UnknownNameError("method", name, NAMES)
            if kind in made:
                raise FitError(f"method {text!r} names two parts of one kind, {name!r} the second; leave one out.")
            made[kind] = _part(PARTS[kind][0][name], name, options, text)
        if "arrival" in made:  # takes a server
            made.setdefault("exchange", ParameterServer())
        return cls(**{kind: names[default]() for kind, (names, default) in PARTS.items()} | made, name=text.strip())

    @property
    def text(self) -> str:
        """The text that `parse` reads; parts and options that have their defaults are left out."""
        words = []
        for kind, (names, default) in PARTS.items():
            part = getattr(self, kind)
            name = next(name for name, each in names.items() if type(part) is each)
            options = [
                f":{field.name}={_text(getattr(part, field.name))}"
                for field in fields(part)
                if getattr(part, field.name) != field.default
            ]
            # An arrival rule without an exchange would mean a parameter server.
            if name != default or options or (kind == "exchange" and not isinstance(self.arrival, WaitForAll)):
                words.append(name + "".join(options))
        if self.learning_rate is not None:
            words.append(f"{_LEARNING_RATE}={_text(self.learning_rate)}")
        return "+".join(words) or PARTS["exchange"][1]


def check_sizes(method: FitMethod, workers: int, updates: int, samples: int) -> None:
    """Refuse a method that a run of so many updates, on so many samples, says nothing of.

    Raises:
        FitError: steps between two exchanges, or portions of the batch, are more than there are.
    """
    exchange = method.exchange
    for name in ("period", "fetch", "push"):
        steps = getattr(exchange, name, 1)
        if steps > updates:
            raise FitError(
                f"{method.name}: {name}={steps} is more than the {counted(updates, 'update')} of the run; choose fewer "
                "steps, or more updates."
            )
    if isinstance(exchange, Sandblaster) and exchange.portions * workers > samples:
        raise FitError(
            f"{method.name}: {exchange.portions} portions for each of {counted(workers, 'worker')} are more than the "
            f"{counted(samples, 'training sample')}; choose fewer."
        )


def _part(part: type, name: str, options: list[str], text: str) -> Any:
    types = get_type_hints(part)
    known = {field.name: types[field.name] for field in fields(part)}
    values = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in known:
            expected = ", ".join(known) or "none"
            raise FitError(f"method {text!r}: {name} has no option {key!r}; expected one of: {expected}.")
        if key in values:
            raise FitError(f"method {text!r} gives {key!r} of {name} twice; leave one out.")
        values[key] = value if known[key] not in (int, float) else _number(value, known[key], option, text)
    return part(**values)


def _text(value: object) -> str:
    """A number as it is read: a plus sign would begin the next part."""
    return str(value).replace("e+", "e")


def _number(value: str, kind: type, option: str, text: str) -> Any:
    try:
        number = kind(value)
        if not math.isinf(number) and (kind is float or abs(number) <= _MOST):  # of NaN each part says what it expects
            return number
    except (ValueError, OverflowError):
        pass
    what, most = ("whole number", f" of at most {_MOST}") if kind is int else ("number", "")
    raise FitError(f"method {text!r}: {option!r} has no {what}{most}; expected a {what}{most} after '='.")
