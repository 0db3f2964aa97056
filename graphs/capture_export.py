"""torch.export without its chatter."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from graphs.capture_costs import general_kernels
from graphs.capture_joint import output_tensors

_CHATTY_LOGGER = "torch.fx.experimental.symbolic_shapes"


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a model for inference; whatever type it returns, the program returns the tensors in it."""
    # torch.export refuses outputs of types it does not know, such as caches.
    flat_output = model.register_forward_hook(lambda module, inputs, output: tuple(output_tensors(output)))
    try:
        with torch.no_grad(), general_kernels(), _quiet():
            return torch.export.export(model, args, kwargs, strict=False)
    finally:
        flat_output.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings about the borrowed weights, and the half-made graph that a failed export prints, off the screen."""
    logger = logging.getLogger(_CHATTY_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), warnings.catch_warnings():
            # Recurrent layers rebuild their list of weights when these are replaced; that is undone afterwards.
            warnings.filterwarnings("ignore", message="The tensor attributes? ", category=UserWarning)
            yield
        # It went well, so what was printed is the model's own.
        sys.stderr.write(printed.getvalue())
    finally:
        logger.setLevel(level)
