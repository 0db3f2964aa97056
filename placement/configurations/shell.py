"""Flags of a command in a shell script, each with its value and line, as far as that needs no shell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphs.errors import ConfigurationError
from placement.configurations.documents import check_text

SCRIPT = "script"  # the entry that has the name of the Python file
_TOKEN = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<joined>\\\n)
    |(?P<end>&&|\|\||(?<!\S)\d*>>?(?:&\d)?|<<<?|[;|&><\n])
    |(?P<open>\()|(?P<close>\))
    |(?P<space>[ \t\r]+)
    |(?P<word>(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^}]*\}
        |\[[^\]\s]*\]|[^\s"'();|&><\\`])+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_USED = re.compile(r"\$\(\((?P<sum>.*?)\)\)|\$\{(?P<braced>[^}]*)\}|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?])", re.DOTALL)
_QUOTED = re.compile(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'|\\(.)", re.DOTALL)
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_LAUNCHERS = {"torchrun", "python", "python3"}
_TESTS = {"[", "[[", "test"}
_MOST_DEPTH, _MOST_TEXT = 20, 1 << 16  # variables in each other, and characters that all of them stand for
_SKIPPED = {"export", "declare", "local", "readonly", "then", "else", "do", "srun", "exec"}


@dataclass(frozen=True)
class Word:
    """One word.

    Attributes:
        text: without its quotes.
        line: on which it begins.
        branch: the line on which it, or the value of a variable in it, stands in a branch or loop; 0 for none.
        ends: it ends a command.
    """

    text: str
    line: int
    branch: int = 0
    ends: bool = False


class _Variables(dict[str, list[Word]]):
    """The words of each variable. With every use a text may double, so that all that is used is counted."""

    def __init__(self) -> None:
        super().__init__()
        self._characters = 0

    def used(self, name: str) -> list[Word]:
        """The words of a variable; none where nobody sets it."""
        words = self.get(name, [])
        self._characters += sum(len(word.text) + 1 for word in words)
        if self._characters > _MOST_TEXT:
            raise ConfigurationError(
                f"the variables of the script stand for more than {_MOST_TEXT:,} characters; write their values out."
            )
        return words


def flags_of(text: str) -> dict[str, tuple[Any, Word]]:
    """By flag, its values as a list of words, and the word of the flag itself; `SCRIPT` has the Python file.

    Flags of a variable count where a command uses it; without any command, those of all variables do.

    Raises:
        ConfigurationError: a flag that stands in the script twice with different values.
    """
    check_text(text)
    variables = _Variables()
    command = list(_command(list(_words(text, 1)), variables))
    words = [each for word in command for each in _expanded(word, variables, 0)]
    if not any(word.text.startswith("--") for word in words):
        words = [each for several in variables.values() for word in several for each in _expanded(word, variables, 0)]
    return _collected(_launched(words))


def _launched(words: Sequence[Word]) -> list[Word]:
    """Words without those of a command that stand before the launcher, such as srun's own flags."""
    found: list[Word] = []
    begin = 0
    for word in words:
        if word.text.rpartition("/")[2] in _LAUNCHERS:
            del found[begin:]
        found.append(word)
        begin = len(found) if word.ends else begin
    return found


def _words(text: str, line: int) -> Iterator[Word]:
    """Words, and ends of commands, with their lines; a bracket is a word."""
    depth = 0
    first, is_asked = True, False  # whether a test says if what follows runs
    for match in _TOKEN.finditer(text):
        kind, found = match.lastgroup, match[0]
        if kind in ("word", "open", "close", "other"):
            if first and found in _OPENS:
                depth += 1
            is_asked = is_asked or (first and found in _TESTS)
            is_set = first and _ASSIGNED.fullmatch(found) is not None
            yield Word(found, line, line if depth or (is_asked and is_set) else 0)
            if first and found in _CLOSES:
                depth -= 1
            first = first and found in _SKIPPED
        elif kind == "end":
            yield Word(found, line, line if depth else 0, ends=True)
            first, is_asked = True, is_asked and found in ("&&", "||")
        line += found.count("\n")


def _command(words: Sequence[Word], variables: _Variables) -> Iterator[Word]:
    """The words of commands; assignments go to `variables`."""
    k, first = 0, True
    while k < len(words):
        word = words[k]
        assigned = _ASSIGNED.fullmatch(word.text) if first and not word.ends else None
        if assigned is None:
            first = word.ends or (first and word.text in _SKIPPED)
            yield word
            k += 1
            continue
        name, value = assigned["name"], assigned["value"]
        before = variables.get(name, []) if assigned["more"] else []
        if not value and k + 1 < len(words) and words[k + 1].text == "(":
            end = next((j for j in range(k + 2, len(words)) if words[j].text == ")"), len(words))
            variables[name] = [*before, *(each for each in words[k + 2 : end] if not each.ends)]
            k = end + 1
        else:
            variables[name] = [*before, replace(word, text=value)]
            k += 1


def _expanded(word: Word, variables: _Variables, depth: int) -> Iterator[Word]:
    """A word with its variables in their places, cut at spaces where it is one variable or a quoted text of flags."""
    if word.ends or depth > _MOST_DEPTH:
        yield word
        return
    bare = word.text[1:-1] if re.fullmatch(r'"\$\{?\w+(?:\[[@*]\])?\}?"', word.text) else word.text
    whole = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", bare)
    if whole is not None and whole[1] in variables:
        for each in variables.used(whole[1]):
            yield from _expanded(replace(each, branch=each.branch or word.branch), variables, depth + 1)
        return
    text = _unquoted(word.text)
    if text != word.text and re.search(r"(?:^|\s)--\w", text) and re.search(r"\s", text):
        first = word.line
        for inside in _words(text.replace("\\\n", " \n"), first):
            if not inside.ends:
                yield from _expanded(replace(inside, branch=word.branch), variables, depth + 1)
        return
    yield replace(word, text=_filled(text, variables, depth), branch=word.branch or _branch(text, variables, depth))


def _unquoted(text: str) -> str:
    return _QUOTED.sub(lambda found: next(group for group in found.groups() if group is not None), text)


def _filled(text: str, variables: _Variables, depth: int, own: frozenset[str] = frozenset()) -> str:
    """Variables and sums in a word by their values; ``own``, in whose values it stands, and those nobody sets stay."""
    if "$" not in text or depth > _MOST_DEPTH:
        return text

    def value(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", r"${\1}", found["sum"])
            total = _sum(_filled(names, variables, depth + 1, own))
            return found[0] if total is None else str(total)
        name, _, default = (found["braced"] or found["plain"]).partition(":-")
        words = [] if name in own else variables.used(name)  # as of NAME=${NAME:-2}
        if len(words) == 1:
            return _filled(_unquoted(words[0].text), variables, depth + 1, own | {name})
        return _filled(_unquoted(default), variables, depth + 1, own) if default else found[0]

    return _USED.sub(value, text)


def _branch(text: str, variables: _Variables, depth: int, own: frozenset[str] = frozenset()) -> int:
    """The line of a branch in which a variable of a word, or one in its value, is set; 0 where none is."""
    names = re.findall(r"\$\{?([A-Za-z_]\w*)", text) if depth <= _MOST_DEPTH else []
    names += [name for each in re.findall(r"\$\(\((.*?)\)\)", text) for name in re.findall(r"[A-Za-z_]\w*", each)]
    names = [name for name in dict.fromkeys(names) if name not in own]
    words = [word for name in names for word in variables.used(name)]
    own |= {*names}
    return next((line for word in words if (line := word.branch or _branch(word.text, variables, depth + 1, own))), 0)


def _sum(text: str) -> int | None:
    """A whole number by +, -, *, / and brackets; None where the text is none."""
    try:
        return _number(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return left // right
    raise ValueError("no number")


def _collected(words: Sequence[Word]) -> dict[str, tuple[Any, Word]]:
    found: dict[str, tuple[list[str], Word]] = {}
    before: list[tuple[str, list[str], Word]] = []  # flags that stand again
    values: list[str] | None = None
    name: str | None = None
    for word in words:
        if word.ends:
            values = None
        elif re.match(r"--[A-Za-z]", word.text):
            name, has_value, value = word.text.partition("=")
            name = name.replace("_", "-")
            if name in found:
                before.append((name, *found[name]))
            values = [value] if has_value else []
            found[name] = (values, word)
        elif word.text.endswith(".py"):
            found.setdefault(SCRIPT, ([word.text], word))
            values = None
        elif values is not None and name is not None:
            values.append(word.text)
            if word.branch and not found[name][1].branch:
                found[name] = (values, replace(found[name][1], branch=word.branch))
    for flag, given, word in before:
        now, last = found[flag]
        if now != given:
            raise ConfigurationError(
                f"line {last.line}: {flag} is {' '.join(now) or 'given'}, and on line {word.line} it is "
                f"{' '.join(given) or 'given'}; expected one value."
            )
    return dict(found)
