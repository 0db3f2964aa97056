"""Keep torch's own log off the screen while a model is captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# They print tracebacks of errors that are then retried another way, or end in a sentence of our own.
_CHATTY = (
    "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_impls",
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.proxy_tensor",
)


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silence these loggers below ``CRITICAL``; their levels come back, also after an error."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
