"""Tensors that wait in the memory of the host: copies to and from pinned memory, on streams beside computing.

On a CPU, whose memory is that of the host, they stay where they are.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Away(NamedTuple):
    """A tensor on its way to the host, or there.

    Attributes:
        value: the copy, pinned; of a CPU's tensor that itself.
        device: to which it comes back.
        done: of the copy; None where there is none.
    """

    value: torch.Tensor
    device: torch.device
    done: torch.cuda.Event | None


def sent_away(tensor: torch.Tensor) -> Away:
    """Begin to copy a tensor to the host; does not wait."""
    if tensor.device.type != "cuda":
        return Away(tensor, tensor.device, None)
    stream, now = _stream(tensor.device, "there"), torch.cuda.current_stream(tensor.device)
    host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)  # its memory is used again once the copy has been made, not before
    return Away(host, tensor.device, stream.record_event())


def asked_back(away: Away) -> Away:
    """Begin to copy a tensor back to its device; does not wait."""
    if away.done is None:
        return away
    _stream(away.device, "back").wait_event(away.done)
    return _on_its_way(away.value, away.device)


def copied_in(tensor: torch.Tensor, device: torch.device) -> Away:
    """Begin to copy a tensor that lies on the host to a device; does not wait."""
    return _on_its_way(tensor.detach(), device) if device.type == "cuda" else Away(tensor, device, None)


def landed(away: Away) -> torch.Tensor:
    """A tensor that was sent away, on the host, for what the host does from now on."""
    if away.done is not None:
        away.done.synchronize()
    return away.value


def added_on_host(total: Away | torch.Tensor, part: Away) -> torch.Tensor:
    """The sum on the host of two tensors that were sent there, or of a sum and another one, in its memory."""
    if isinstance(total, Away):
        return torch.add(landed(total), landed(part))
    return total.add_(landed(part))


def _on_its_way(tensor: torch.Tensor, device: torch.device) -> Away:
    """The copy of a pinned tensor on a GPU, once the stream of copies comes to it."""
    stream = _stream(device, "back")
    with torch.cuda.stream(stream):
        value = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        value.copy_(tensor, non_blocking=True)
    return Away(value, device, stream.record_event())


def arrived(away: Away) -> torch.Tensor:
    """The tensor on its device, for what is launched from now on."""
    if away.done is not None:
        now = torch.cuda.current_stream(away.device)
        now.wait_event(away.done)
        away.value.record_stream(now)
    return away.value


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    """The stream of one way, of one device: links carry both ways at the same time."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
