"""Seeded damage to files: flipped bits, cuts, other types, extreme numbers, depth, doubled keys, odd names, traps."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = (
    *("0", "-1", "1", "1e308", "-1e308", "1e-308", "5e-324", "NaN", "Infinity", "-Infinity", "nan", "inf", "1e999"),
    *("0.5", "1e30", "9" * 30, "9" * 400, "9" * 5000, str(2**31), str(2**62), str(2**63 - 1), str(2**63), str(2**64)),
    *(
        "2",
        "3",
        "7.5",
        "1000",
        "2e6",
        "3e-4",
        "17",
        "1e18",
        "-0.0",
        "true",
        "null",
        '"text"',
        "[]",
        "{}",
        "0x10",
        "1_000",
        "9**9**9**9",
        "1000000000",
    ),
)
_TEXTS = (
    *("", " ", "*", "gpu", "cpu", "gpu0", "op0", "op1", "a" * 100_000, "\x1b]0;title\x07\x1b[2J", "line\nline", "\x00"),
    *(
        "\ud800",
        "\u202e",
        "é" * 50,
        "../../etc/passwd",
        "<script>",
        "%s%n{0}",
        "x=__import__('os').system('touch TRAP')",
    ),
    *(
        "__import__('os').system('touch TRAP')",
        "os.system",
        "9**9**9**9",
        "Pow(9, Pow(9, 99))",
        "torch.hub.load",
        "]" * 9,
    ),
)


def mutated(kind: str, data: bytes, rng: random.Random) -> bytes:
    """A damaged copy: archives member by member or as bytes, JSON as values or as text, all others as text or bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if kind in ("policy", "pt2"):
            data = _in_archive(data, rng) if rng.random() < 0.85 else _in_bytes(data, rng)
        elif kind == "onnx":
            data = _in_model(data, rng) if rng.random() < 0.6 else _in_bytes(data, rng)
        else:
            data = _in_text(data, rng)
    return data


def _in_bytes(data: bytes, rng: random.Random) -> bytes:
    changed, at = bytearray(data), rng.randrange(len(data) or 1)
    match rng.randrange(5):
        case 0:
            for _ in range(rng.choice((1, 1, 2, 8))):
                if changed:
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            del changed[at : at + rng.choice((1, 2, 8, 100))]
        case 3:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        case _:
            changed[at:at] = changed[at : at + rng.choice((1, 10, 200))] * rng.choice((1, 2, 50))
    return bytes(changed)


def _in_text(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return _in_bytes(data, rng)
    if rng.random() < 0.5:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            return json.dumps(_in_value(value, rng)).encode()
    text = data.decode("utf-8", "surrogateescape")
    match rng.randrange(5):
        case 0 | 1:  # a number becomes another, or something else
            text = _one_replaced(text, r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null", rng, rng.choice(_NUMBERS))
        case 2:  # a text becomes another
            text = _one_replaced(text, r'"[^"\n]*"', rng, json.dumps(rng.choice(_TEXTS)))
        case 3:  # deep
            depth = rng.choice((10, 500, 3000, 100_000))
            deep = rng.choice(
                ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth, "a." * depth, "-" * depth + "1")
            )
            text = _one_replaced(text, r'"[^"\n]*"|\d+', rng, deep)
        case _:  # a line or an entry twice, also with its key
            entries = list(re.finditer(r'"[^"]*": ?[^,{}\[\]]+,|[^\n]*\n', text))
            if entries:
                entry = rng.choice(entries)
                text = text[: entry.end()] + entry.group() + text[entry.end() :]
    return text.encode("utf-8", "surrogatepass" if "\ud800" in text else "surrogateescape")


def _one_replaced(text: str, pattern: str, rng: random.Random, by: str) -> str:
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    chosen = rng.choice(found)
    return text[: chosen.start()] + by + text[chosen.end() :]


def _in_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of the values in it replaced, left out, renamed, moved or doubled."""
    places = list(_places(value))
    if not places:
        return value
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            number = rng.choice(_NUMBERS)
            holder[key] = float(number) if re.fullmatch(r"-?[\d.]+e?-?\d*", number) and "e" in number else number
            if re.fullmatch(r"-?\d+", number) and len(number) < 4000:
                holder[key] = int(number)
        case 2:
            holder[key] = rng.choice(_TEXTS)
        case 3:
            del holder[key]
        case 4:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        case _:
            if isinstance(holder, list):
                holder.insert(key, holder[key])
            else:
                holder[rng.choice(_TEXTS)] = holder.pop(key)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


class _Trap:
    """Unpickling this makes a file, in the folder where it is done."""

    def __reduce__(self) -> Any:
        return os.system, ("touch TRAP",)


def _in_archive(data: bytes, rng: random.Random) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = {name: old.read(name) for name in old.namelist()}
    except Exception:
        return _in_bytes(data, rng)
    if not members:
        return _in_bytes(data, rng)
    names = sorted(members)
    # Programs and records are worth most of the damage.
    name = rng.choice([n for n in names if n.endswith(".json")] or names) if rng.random() < 0.75 else rng.choice(names)
    extra, before = None, False
    match rng.randrange(12):
        case 0:
            members[name] = pickle.dumps(_Trap())
        case 1:
            del members[name]
        case 2:
            members[rng.choice((f"{name}2", name.upper(), "net/data/aotinductor/a.so", "../x", "net/é", "x" * 300))] = (
                b"{}"
            )
        case 3:
            extra = name
        case 4:
            members = {n: _marked(content) for n, content in members.items()}
            before = rng.random() < 0.5  # two archives in one file, of which only one is sound
        case _:
            is_text = members[name][:1] in (b"{", b"[")
            members[name] = (_in_text if is_text else _in_bytes)(members[name], rng)
    out = io.BytesIO()
    packing = zipfile.ZIP_DEFLATED if rng.random() < 0.03 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", packing) as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two members of one name
        for member, content in members.items():
            new.writestr(member, content)
        if extra is not None:
            new.writestr(extra, members[extra])
    return out.getvalue() + data if before else out.getvalue()


def _marked(content: bytes) -> bytes:
    """Weights that are said to be pickles, and pickles for weights."""
    if b"use_pickle" in content:
        return content.replace(b'"use_pickle": false', b'"use_pickle": true')
    return pickle.dumps(_Trap()) if not content.startswith((b"{", b"[")) and len(content) > 45 else content


def _in_model(data: bytes, rng: random.Random) -> bytes:
    """One field of an ONNX model set to something else."""
    import onnx

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return _in_bytes(data, rng)
    fields = list(_fields(model))
    message, field = rng.choice(fields)
    value: Any = getattr(message, field.name)
    numbers = (0, -1, 1, 99, 2**31 - 1, -(2**31), 2**62)
    changes: dict[str, Callable[[], Any]] = {
        "int": lambda: rng.choice(numbers),
        "float": lambda: rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf"))),
        "str": lambda: rng.choice(_TEXTS).replace("\ud800", "?"),
        "bytes": lambda: rng.choice(_TEXTS).encode("utf-8", "replace"),
    }
    try:
        if field.is_repeated:
            if rng.random() < 0.3 and len(value):
                del value[rng.randrange(len(value))]
            elif field.message_type is None and len(value):
                value[rng.randrange(len(value))] = changes[type(value[0]).__name__]()
            elif len(value):
                value.extend([value[0]] * rng.choice((1, 1, 40)))
        elif field.message_type is not None:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, changes[type(value).__name__]())
    except (ValueError, TypeError, KeyError):
        message.ClearField(field.name)  # a number that the field cannot hold
    return model.SerializeToString()


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _fields(inner)
