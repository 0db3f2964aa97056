"""Parameters and buffers that a run gives another tensor or other data, as writes to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from graphs.capture.failure import Untraceable
from graphs.capture.trace import CONSTANT, TensorInfo, flat, tensor_info, value_of
from graphs.opgraph import Phase

if TYPE_CHECKING:
    from graphs.capture.record import Recorder


def reassigned(recorder: Recorder, model: nn.Module) -> list[tuple[fx.Node, fx.Node]]:
    """Parameters and buffers that the run has given another tensor, or other data, of their shape and type.

    Returns:
        The placeholder of each, and the node of what it has now.
    """
    every = (model.named_parameters, model.named_buffers)
    now = {name: tensor for named in every for name, tensor in named(remove_duplicate=False)}
    found = []
    for placeholder, state in list(recorder.states.items()):
        info = None if state.kind == CONSTANT or state.name not in now else tensor_info(now[state.name])
        if info is None or info == state.info or info.layout[::2] != state.info.layout[::2]:
            continue
        node = recorder.node_of(now[state.name])
        if node.op == "placeholder":  # which may have been given another tensor itself
            raise Untraceable(f"{state.name} becomes another tensor of the model's", "write its numbers by copy_")
        found.append((placeholder, node))
    return found


def write_back(recorder: Recorder, moved: list[tuple[fx.Node, fx.Node]]) -> None:
    """Write to parameters and buffers what the run has given them, as ``copy_`` would.

    That is in the forward pass, unless the backward pass reads what they had.
    """
    nodes = list(recorder.graph.nodes)
    for placeholder, source in moved:
        storage = recorder.states[placeholder].info.storage
        late = [one for one in nodes if one.meta.get("phase") == Phase.BACKWARD]
        reads = [info for one in late for read in one.all_input_nodes for info in flat(value_of(read))]
        is_read = any(isinstance(info, TensorInfo) and info.storage == storage for info in reads)
        last = nodes[-1] if is_read or not late else late[0].prev
        with recorder.graph.inserting_after(last):
            made = recorder.graph.call_function(torch.ops.aten.copy_.default, (placeholder, source))
        made.meta.update(info=placeholder.meta["info"], module=source.meta["module"], call=source.meta.get("call"))
        made.meta["phase"] = Phase.BACKWARD if is_read else Phase.FORWARD
