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
    # Those that torch gave a level of their own, too; the others have that of "torch".
    known = logging.root.manager.loggerDict.items()
    own = [
        each for name, each in known if name.startswith("torch.") and isinstance(each, logging.Logger) and each.level
    ]
    levels = {logger: logger.level for logger in (logging.getLogger("torch"), *own)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
