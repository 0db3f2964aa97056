"""`torch_script`: a strategy as a script of plain PyTorch, which runs under torchrun without this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.opgraph import OpGraph
from placement.exporters.scripts.text import script_text
from placement.runtime.setups.setup_of import facts_of

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


def torch_script(result: Result, graph: OpGraph | None, model: nn.Module | None, source: str | None) -> str:
    """A script that trains a model under a result's strategy; `placement.export` has arguments and errors."""
    return script_text(facts_of(result, graph, model, source))
