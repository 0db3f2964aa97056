"""numba's compiler as this project uses it: a few kinds of functions, and a cache that knows all its sources.

* `entry`, which Python calls. `parallel_entry`: its `prange` loops are shared out over threads.
  `entry_without_arrays`: it makes none, so numba need not count references to those it reads.
* `inner`, which only compiled functions call. It makes no arrays, so numba need not count references to them, and it
  has none of the wrappers for Python, which take as long to compile as the function. `allocating`: it makes arrays.
* `inlined`, a few lines that are copied into their callers before types are known.

None needs Python's lock. Division by zero gives infinity, as in numpy.

Compiled functions are kept beside the source, or in the user's cache folder. Where neither can be written (a read-only
install in a container, say) numba refuses to compile; then they live in a folder of this process.
"""

from __future__ import annotations

import ast
import atexit
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from numba import njit, prange
from numba.core import config, event
from numba.core.caching import FunctionCache

from env import compiling

__all__ = [
    "SHARED_CACHE",
    "allocating",
    "entry",
    "entry_without_arrays",
    "inlined",
    "inner",
    "parallel_entry",
    "prange",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
SHARED_CACHE = True  # whether another process would find what this one compiles
_BODY = re.compile(r"^(?:@|def |class )", re.MULTILINE)  # where a file's imports have ended


# -- A place for the cache ------------------------------------------------------------------------------------


def _probe() -> int:
    return 0


def _use_a_temporary_folder() -> None:
    # Not a shared folder under a known name: numba unpickles what it finds in its cache.
    from graphs.disk import temporary_folder  # seldom needed

    stack = ExitStack()
    config.CACHE_DIR = str(stack.enter_context(temporary_folder()))  # type: ignore[attr-defined]
    atexit.register(stack.close)


try:
    njit(cache=True)(_probe)
except RuntimeError:
    _use_a_temporary_folder()
    SHARED_CACHE = False


# -- What a compiled function depends on -----------------------------------------------------------------------


@functools.cache
def sources(module: str) -> str:
    """A hash of everything that the kernels of a loaded module are compiled from."""
    texts = (f"{name}\n{_source(name)}" for name in sorted(source_modules(module)))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def source_modules(module: str) -> set[str]:
    """The modules that a module's kernels are compiled from.

    These are the module itself, everything it imports from this project at the top (constants, records and functions
    come from there), and so on through those of them that have kernels.
    """
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            imported = set(_imports(name))
            if name == module or __name__ in imported:
                waiting += imported
    return found


def _imports(module: str) -> Iterator[str]:
    """The modules of this project that are imported at the top of a loaded module, for more than annotations."""
    own = {"graphs", "env", "baselines", "placement", module.partition(".")[0]}
    source = _source(module)
    try:
        # The rest need not be parsed, which would take longer than loading a kernel from the cache.
        tree = ast.parse(_BODY.split(source, maxsplit=1)[0])
    except SyntaxError:  # a string with such a line
        tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in sys.modules else str(node.module) for name in within]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in own)


@functools.cache
def _source(module: str) -> str:
    spec = sys.modules[module].__spec__
    text = spec.loader.get_source(module) if spec and spec.loader and hasattr(spec.loader, "get_source") else ""
    return text or ""


class _Cache(FunctionCache):
    """numba's cache of one function, which looks at the function's own file only, for all files it comes from."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._sources = sources(function.__module__)  # now, while files are as they have been imported

    def _index_key(self, *arguments: Any) -> tuple[Any, ...]:
        return (*super()._index_key(*arguments), self._sources)  # type: ignore[no-untyped-call]

    def load_overload(self, *arguments: Any) -> Any:
        """Code compiled before; none where its files are damaged, or of a version whose records had other names.

        numba keeps the types of arguments pickled, by the names of their classes, and reads them before it compares
        anything: a record renamed since, or a file that a power cut has left empty, would end every call.
        """
        try:
            return super().load_overload(*arguments)  # type: ignore[no-untyped-call]
        except Exception:  # whatever unpickling raises
            self.flush()  # type: ignore[no-untyped-call]
            return None


# -- Kinds of functions ----------------------------------------------------------------------------------------


def _kind(**options: Any) -> Callable[[FunctionT], FunctionT]:
    def decorate(function: FunctionT) -> FunctionT:
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        if "inline" not in options:
            dispatcher._cache = _Cache(function)
        return dispatcher  # type: ignore[no-any-return]

    return decorate


_UNWRAPPED = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry = _kind(no_cfunc_wrapper=True)
parallel_entry = _kind(no_cfunc_wrapper=True, parallel=True)
allocating = _kind(**_UNWRAPPED)
inner = _kind(_nrt=False, **_UNWRAPPED)
entry_without_arrays = _kind(_nrt=False, no_cfunc_wrapper=True)
inlined = _kind(inline="always")


# -- Word of what is compiled ----------------------------------------------------------------------------------


class _Reporter(event.Listener):
    """Reports the functions that are called from Python, not those that they call in turn."""

    def __init__(self) -> None:
        self._depth = 0

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            function = event.data["dispatcher"].py_func
            compiling.report(f"{function.__module__}.{function.__name__}")

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            compiling.report("")


event.register("numba:compile", _Reporter())  # type: ignore[no-untyped-call]
