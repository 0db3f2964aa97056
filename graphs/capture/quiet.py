"""Keep torch's own log off the screen while a model is captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silence all of torch's loggers below ``CRITICAL``; their levels come back, also after an error.

    They print tracebacks of errors that are then retried another way, or end in a sentence of our own.
    """
    # Each by its name: torch gives levels of their own to many of them.
    names = ["torch", *(name for name in list(logging.root.manager.loggerDict) if name.startswith("torch."))]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
