"""Small whole numbers, packed so that each takes only its bits on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [ceil(n * bits / 8)]: integers [n] from 0 to 2**bits - 1, the low bits first."""
    spread = torch.stack([(codes >> k & 1).to(torch.uint8) for k in range(bits)], 1).view(-1)
    padded = torch.nn.functional.pad(spread, (0, -len(spread) % 8)).view(-1, 8)
    return torch.stack([padded[:, k] << k for k in range(8)]).sum(0, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int, n: int) -> Tensor:
    """int64 [n]: the codes of `packed`."""
    spread = torch.stack([data >> k & 1 for k in range(8)], 1).view(-1)[: n * bits].view(n, bits)
    return torch.stack([spread[:, k].long() << k for k in range(bits)]).sum(0)
