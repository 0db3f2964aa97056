"""Findings of checks, kept on disk from run to run.

The file lies where captured graphs do (`graphs.zoo.cache`) and may be deleted at any time. One that cannot be read is
made anew; that of another version of torch or of this package is never read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import graphs
from graphs.disk import read_json, write_atomically
from graphs.errors import GraphFileError
from graphs.zoo.cache import cache_dir

_NAME = "checked"

Findings = Mapping[
    str, dict[str, Any]
]  # of a step, strategy and cluster: fields of `placement.solving.checked.Checked`


def load() -> Findings:
    """Known findings; none where the file is none of ours."""
    if not _path().is_file():  # a pipe would wait for a writer
        return {}
    try:
        found = dict(read_json(_path()))
    except (GraphFileError, TypeError, ValueError):
        return {}
    return found if all(type(one) is dict for one in found.values()) else {}


def save(more: Findings) -> None:
    """Add what was found; other processes may have added theirs."""
    import json

    both, path = {**load(), **more}, _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{_NAME}-*.json"):
            if old != path:
                old.unlink(missing_ok=True)
        write_atomically(path, json.dumps(both))
    except OSError:
        pass


def _path() -> Path:
    return cache_dir() / f"{_NAME}-{_stamp()}.json"


@cache
def _stamp() -> str:
    """Changes with torch and with our own source."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    root = Path(graphs.__file__).parents[1]
    for package in ("graphs", "env", "baselines", "placement"):
        for source in sorted((root / package).rglob("*.py")):
            digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]
