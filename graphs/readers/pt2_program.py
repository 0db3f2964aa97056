"""The program in a ``.pt2`` file, cut down to what a graph is read from, and checked text by text.

PyTorch makes Python source of a program's names and runs it, evaluates the text of symbolic sizes, looks up operators
by dotted name and imports the modules that its tree specifications name. So nothing passes that is not known to be
harmless: what no graph needs is dropped, and every text that is left has a form of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from math import ceil, prod
from typing import Any

from graphs.errors import GraphFileError

# An operator: torch.ops.aten.mm.default, _operator.getitem, math.ceil, torch.sym_max, torch._sym_sqrt; but none of
# those that make or make use of other functions.
_NAME = r"(?:(?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)"
_OPERATOR = re.compile(
    rf"torch\.ops\.{_NAME}\.{_NAME}(\.{_NAME})?|math\.{_NAME}|torch\._?sym_\w+"
    rf"|_operator\.(?!(?:attrgetter|call|itemgetter|methodcaller)$){_NAME}"
)
# Any other text: without brackets, quotes, equals signs and line breaks no Python source calls or assigns anything.
_TEXT = re.compile(r"[\w.+/ -]{0,1000}")
_SYMBOL = re.compile(r"[a-z]+[0-9]{1,5}")  # torch counts up to the number of a symbol without a value
_FREE = frozenset({"as_string", "as_strings", "nn_module_stack", "stack_trace"})  # constants, and where it comes from
_CUSTOM = frozenset({"as_custom_obj", "custom_obj"})


def plain_program(document: Any, where: str) -> dict[str, Any]:
    """The program in a parsed ``models/NAME.json``, without what `graphs.capture.from_exported_program` does not read.

    Raises:
        GraphFileError: it is no program, or loading it could run code from the file.
    """
    module = document.get("graph_module") if isinstance(document, dict) else None
    ranges = document.get("range_constraints", {}) if isinstance(document, dict) else None
    if not isinstance(module, dict) or not isinstance(ranges, dict):
        raise GraphFileError(f"{where} is damaged: its program is no graph with its sizes; save it again.")
    whole = {"fqn": "", "signature": None}  # how arguments nest is told by names of types, which torch would look up
    kept = {**module, "module_call_graph": [whole], "metadata": {}, "treespec_namedtuple_fields": {}}
    symbols = {size: ends for size, ends in ranges.items() if _SYMBOL.fullmatch(size)}  # not of 2*s0, that follows
    program = {**document, "graph_module": kept, "guards_code": [], "range_constraints": symbols}
    for key, item in _items(program):
        if isinstance(item, str):
            _check_text(key, item, where)
        elif isinstance(item, dict):
            if key == "metadata":  # of a node: texts by name, and two of them are read
                for unread in [name for name, value in item.items() if isinstance(value, str) and name not in _FREE]:
                    del item[unread]
            for name in item:
                _check_text("", name, where)
    return program


def refusal(where: str, what: str) -> GraphFileError:
    """The error for a file that would do more than build a graph."""
    return GraphFileError(
        f"{where} is refused: {what}, and loading it could run code from the file; capture the model in Python instead."
    )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in a JSON value with the key that it stands under, each before what is in it."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        key, item = stack.pop()
        yield key, item
        if isinstance(item, dict):
            stack.extend(item.items())
        elif isinstance(item, list):
            stack.extend((key, inner) for inner in item)


def _check_text(key: str, value: str, where: str) -> None:
    if value in _CUSTOM:
        raise refusal(where, "it has an object that is no tensor")
    if key in ("target", "as_operator"):
        if not _OPERATOR.fullmatch(value):
            raise refusal(where, f"it calls {value[:80]!r}, which is not an operator")
    elif key == "expr_str":
        if not is_harmless(value):
            raise refusal(where, f"it has a size {value[:80]!r}, which is not arithmetic with small powers")
    elif key not in _FREE and not _TEXT.fullmatch(value):
        raise refusal(where, f"it has a name {value[:80]!r}, which is not made of letters, digits, dots and spaces")


# -- sizes --------------------------------------------------------------------------------------------------------

# Parts of which a symbolic size may consist, e.g. Mul(Integer(2), Symbol('s69', positive=True, integer=True)).
# fmt: off
_FUNCTIONS = frozenset({
    "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "Float", "FloatPow", "FloatTrueDiv",
    "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "IntTrueDiv", "Integer",
    "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing",
    "Mul", "Ne", "Not", "Or", "Pow", "PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal", "RoundToInt",
    "StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat", "TruncToFloat", "TruncToInt", "Unequality", "Where",
    "ceiling", "floor",
})
# fmt: on
# Their second argument is an exponent, or a number of bits or digits.
_POWERS = ("FloatPow", "LShift", "Pow", "PowByNatural", "RShift", "RoundDecimal", ast.LShift, ast.Pow, ast.RShift)
_LONGEST = 4000  # characters of one size
_LARGEST_EXPONENT = 64
_MOST_TERMS = 1000  # of a size that is multiplied out
_MOST_COMPARED = 30  # terms of a Max or Min: sympy compares each with each, slowly
_LARGE_EXPONENT = re.compile(r"\d[eE][+-]?[\d_]{3}")  # which Python takes for infinite, and sympy does not
_NUMBER = re.compile(r"[A-Za-z_]\w{0,99}|[+-]?\d{0,30}\.?\d{0,30}(e[+-]?\d{1,2})?")  # or the name of a symbol


def is_harmless(expression: str) -> bool:
    """Whether a symbolic size is arithmetic on names and numbers, and little work: its text may be evaluated."""
    if len(expression) > _LONGEST or _LARGE_EXPONENT.search(expression):
        return False
    try:
        return _terms(ast.parse(expression.strip(), mode="eval").body) <= _MOST_TERMS
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


def _terms(node: ast.expr) -> int:
    """How many terms a size has once multiplied out, at most, of a power of a number its exponent; or too many.

    Raises:
        ValueError: something that is not arithmetic, or a number of many digits.
    """
    match node:
        case ast.Name() | ast.Constant(value=bool() | None):
            return 1
        case ast.Constant(value=int() | float() | str() as value) if _NUMBER.fullmatch(str(value)):
            return 1
        case ast.UnaryOp(operand=operand):
            return _terms(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(type(op), [left, right])
        case ast.BoolOp(values=values):
            return sum(map(_terms, values))
        case ast.Compare(left=left, comparators=others):
            return sum(map(_terms, [left, *others]))
        case ast.Call(func=ast.Name(id=function), args=args, keywords=keywords) if function in _FUNCTIONS:
            for keyword in keywords:
                _small(keyword.value)
            if function == "Float":  # after the number: how many digits
                _small(*args[1:])
            return _combined(function, args)
    raise ValueError(ast.dump(node))


def _combined(function: str | type[ast.operator], args: list[ast.expr]) -> int:
    if function in _POWERS:
        base, exponent = args
        power = _small(exponent)
        return min(max(int(_terms(base) ** power), power), _MOST_TERMS + 1)
    if function in ("Mul", ast.Mult):
        return min(prod(map(_terms, args)), _MOST_TERMS + 1)
    terms = sum(map(_terms, args))
    return min(terms, _MOST_TERMS + 1) if function not in ("Max", "Min") or terms <= _MOST_COMPARED else _MOST_TERMS + 1


def _small(*nodes: ast.expr) -> int:
    """The largest number in what must be small numbers.

    Raises:
        ValueError: anything else.
    """
    largest = 0
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value <= _LARGEST_EXPONENT:
            largest = max(largest, ceil(node.value))
        elif not isinstance(node, ast.UnaryOp | ast.unaryop | ast.Load | ast.Call) and not (
            isinstance(node, ast.Name) and node.id in ("Float", "Integer", "Rational")
        ):
            raise ValueError(ast.dump(node))
    return largest
