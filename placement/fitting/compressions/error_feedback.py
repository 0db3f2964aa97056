"""The rest that a message leaves out, added to the next values (Seide et al. 2014; Karimireddy et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Residual:
    """The sum of all values so far, less the sum of all that was sent for them.

    Attributes:
        is_kept: without it nothing is added: for messages that are right in the mean.
        left_out: None before the first message.
    """

    is_kept: bool = True
    left_out: Tensor | None = None

    def added_to(self, values: Tensor) -> Tensor:
        """Values to send now: the given ones and the part left out before."""
        return values if self.left_out is None else values + self.left_out

    def keep(self, wanted: Tensor, sent: Tensor) -> None:
        """Take into account that of `added_to`'s values only these were sent."""
        if self.is_kept:
            self.left_out = wanted - sent
