"""Reading a strategy from its line of text: words one after the other, and what is wrong with them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from graphs.errors import StrategyError
from graphs.transforms.axes import AXES, GROUPS, STORAGE_AXES
from graphs.transforms.collectives.rounds import ALGORITHMS, is_algorithm
from graphs.transforms.strategy import NONE, ORDERS, PLACED, STATISTICS, MeshRule, Strategy

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}
_WORD = re.compile(r"[^\s|]+|\|")
_SIZED = re.compile(r"([a-z]+)(\d{1,9})")
_SHARES = re.compile(r"shares=(\d{1,9}(?::\d{1,9})*)")
_OPTIONS = ("recompute=*", "offload=parameters", "bucket=25MB", "updates=fused", "devices=gpu0+gpu1", "cuts=OP")
_MOST_TOLD = 18  # words that a message lists
_IN_TEXT = tuple(dict.fromkeys(axis.in_text for axis in AXES.values()))
_NAMES = {"devices": "device_names", "cuts": "cuts"}  # options that list names, and their fields


def read_strategy(text: str) -> Strategy:
    """The strategy that a line of text says.

    Raises:
        StrategyError: it cannot be read; the message shows the place.
    """
    return _Reader(text).strategy()


def read_strategies(several: Sequence[str | Strategy]) -> tuple[list[Strategy], dict[str, str]]:
    """Strategies, and the texts that are none, with the reason of each.

    Raises:
        StrategyError: none can be read.
    """
    read: list[Strategy] = []
    failed: dict[str, StrategyError] = {}
    for given in several:
        try:
            read.append(given if isinstance(given, Strategy) else Strategy.parse(given))
        except StrategyError as error:
            failed[str(given)] = error
    if failed and not read:
        raise next(iter(failed.values()))
    return read, {text: str(error) for text, error in failed.items()}


def _split(text: str) -> tuple[str, ...]:
    """Names or patterns that are joined by ``+``."""
    return tuple(unquote(name) for name in text.split("+"))


@dataclass(frozen=True)
class _Reader:
    """Reads words one after the other and knows where it is, and what has been said."""

    text: str
    said: set[str] = field(default_factory=set)
    listed: dict[str, Any] = field(default_factory=dict)  # fields that are checked once all else is known

    def strategy(self) -> Strategy:
        result = Strategy()
        if self.text.strip() == NONE:
            return result
        segments: list[list[re.Match[str]]] = [[]]
        for word in _WORD.finditer(self.text):
            if word[0] == "|":
                segments.append([])
            else:
                segments[-1].append(word)
        for words in segments:
            if not words:
                raise StrategyError(
                    f"strategy {self.text!r:.200} has an empty segment; expected for example 'dp8', 'dp4 zero1 | tp2' "
                    f"or 'pp4 1f1b mb8', and {NONE!r} for none."
                )
            result = self._segment(result, words)
        return replace(result, **self.listed)

    def _segment(self, strategy: Strategy, words: list[re.Match[str]]) -> Strategy:
        first, rest = words[0], iter(words[1:])
        name, size = self._sized(first)
        if name in _IN_TEXT:
            return self._axis(strategy, MeshRule(name, size), rest)
        if name == "pp":
            self._once(first, "stages")
            return self._pipeline(replace(strategy, stages=size), rest)
        if name == PLACED:
            self._once(first, "stages")
            self.listed.update(stages=size, order=PLACED)  # of parts, which may follow
        elif name == "mb":
            self._once(first, "micro-batches")
            strategy = replace(strategy, micro_batches=size)
            for word in rest:
                if word[0] != "no_sync":
                    raise self._unknown(word, ["no_sync", "|"])
                self._once(word, "no_sync")
                self.listed["no_sync"] = True
        elif "=" in first[0]:
            strategy = self._option(strategy, first)
        else:
            options = ["pp2", "placed2", "mb8", *_OPTIONS, "reduce=ring", "statistics=sync"]
            options += [NONE] if first[0] == self.text.strip() else []  # beside others it means nothing
            raise self._unknown(first, [*(f"{axis}2" for axis in _IN_TEXT), *options])
        for word in rest:
            raise self._unknown(word, ["|"])
        return strategy

    def _axis(self, strategy: Strategy, rule: MeshRule, rest: Iterator[re.Match[str]]) -> Strategy:
        zero = strategy.zero
        for word in rest:
            name, size = self._sized(word)
            if name == "zero" and rule.name in STORAGE_AXES and 1 <= size <= 3:
                self._once(word, "a level of ZeRO")
                zero = size
            elif word[0] == "sp" and rule.name == "tp":
                rule = replace(rule, sequence=True)
            elif word[0] == "ulysses" and rule.name == "cp":
                rule = replace(rule, by_heads=True)
            elif word[0] == "ring" and rule.name == "cp":
                rule = replace(rule, is_ring=True)
            elif word[0] == "once" and rule.name == "ep":
                rule = replace(rule, once_a_host=True)
            elif word[0] == "experts" and rule.name in ("tp", "cp"):
                rule = replace(rule, has_experts=True)
            elif word[0] == "on":
                self._once(word, f"modules of {rule.name}")
                rule = replace(rule, modules=self._patterns(word, rest))
            elif word[0] == "tp" and rule.name == "dp":
                self._once(word, "modules whose weights dp cuts")
                on = next(rest, None)
                if on is None or on[0] != "on":
                    raise self._unknown(on or word, ["tp on head" if on is None else "on head"])
                rule = replace(rule, tensor_modules=self._patterns(on, rest))
            elif rule.name == "dp" and (given := _SHARES.fullmatch(word[0])):
                self._once(word, "shares")
                rule = replace(rule, shares=tuple(map(int, given[1].split(":"))))
            else:
                options = {
                    "dp": ["zero1", "zero2", "zero3", "shares=2:1", "on", "tp on"],
                    "tp": ["sp", "experts", "on"],
                    "cp": ["ulysses", "ring", "experts", "zero1", "on"],
                    "ep": ["once", "zero1", "zero2", "zero3", "on"],
                }.get(rule.name, ["on"])
                raise self._unknown(word, options)
        mesh = {other.name: other for other in strategy.mesh}
        if rule.name == "dp" and "dp" in mesh and GROUPS not in mesh:
            # The inner one of two axes dp is that with ZeRO.
            outer, rule = (rule, mesh.pop("dp")) if strategy.zero else (mesh.pop("dp"), rule)
            mesh[GROUPS] = replace(outer, name=GROUPS)
        return replace(strategy, mesh=(*mesh.values(), rule), zero=zero)

    def _patterns(self, on: re.Match[str], rest: Iterator[re.Match[str]]) -> tuple[str, ...]:
        """The patterns of modules after the word ``on``."""
        where = next(rest, None)
        if where is None:
            raise self._unknown(on, ["on layers.*.mlp"])
        return _split(where[0])

    def _pipeline(self, strategy: Strategy, rest: Iterator[re.Match[str]]) -> Strategy:
        for word in rest:
            name, size = self._sized(word)
            if word[0] in ORDERS:
                self._once(word, "an order")
                strategy = replace(strategy, order=word[0])
            elif name == "mb":
                self._once(word, "micro-batches")
                strategy = replace(strategy, micro_batches=size)
            elif name == "v":
                self._once(word, "virtual stages")
                strategy = replace(strategy, chunks=size)
            else:
                raise self._unknown(word, [*ORDERS, "mb8", "v2"])
        return strategy

    def _option(self, strategy: Strategy, word: re.Match[str]) -> Strategy:
        key, _, value = word[0].partition("=")
        self._once(word, key)
        if key == "recompute" and value:
            return replace(strategy, recompute=_split(value))
        if key == "offload" and value:
            return replace(strategy, offload=_split(value))
        if key == "reduce" and is_algorithm(value):
            return replace(strategy, reduce=value)
        if key == "statistics" and value in STATISTICS:
            return replace(strategy, statistics=value)
        if key == "updates" and value == "fused":
            return replace(strategy, fused_updates=True)
        if key in _NAMES and value:
            self.listed[_NAMES[key]] = _split(value)
            return strategy
        found = re.fullmatch(r"(\d{1,15})(KB|MB|GB|)", value)
        if key == "bucket" and found:
            return replace(strategy, bucket_bytes=int(found[1]) * _UNITS[found[2]])
        names = [f"reduce={name}" for name in ALGORITHMS] + [f"statistics={name}" for name in STATISTICS]
        raise self._unknown(word, [*_OPTIONS, *names])

    def _once(self, word: re.Match[str], what: str) -> None:
        """Refuse a second answer to one question, which would silently win."""
        if what in self.said:
            raise StrategyError(
                f"strategy {self.text!r:.200} gives {what} twice, the second time at {word[0]!r:.60} (character "
                f"{word.start() + 1}); give it once."
            )
        self.said.add(what)

    def _sized(self, word: re.Match[str]) -> tuple[str, int]:
        found = _SIZED.fullmatch(word[0])
        return (found[1], int(found[2])) if found else ("", 0)

    def _unknown(self, word: re.Match[str], expected: list[str]) -> StrategyError:
        name, size = self._sized(word)
        if size and name in (*_IN_TEXT, "pp", "mb") and expected != ["|"]:
            expected = [f"| {word[0]}", *expected]
        lower = word[0].lower()
        is_case = lower != word[0] and (lower in expected or re.sub(r"\d+$", "2", lower) in expected)
        near = [lower] if is_case else difflib.get_close_matches(word[0], expected, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        return StrategyError(
            f"strategy {self.text!r:.200} cannot be read at {word[0]!r:.60} (character {word.start() + 1}){hint} "
            f"expected {' or '.join(expected[:_MOST_TOLD])}."
        )
