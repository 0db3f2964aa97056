"""Waits of ops for the host that launches them, compiled."""

from __future__ import annotations

import numpy as np

from env.jit import entry
from graphs.arrays import BoolArray, FloatArray, IntArray


@entry
def add_waits(op_s: FloatArray, launch_s: FloatArray, stream: IntArray, has_launches: BoolArray) -> None:
    """Add to each op's seconds what it waits for its host.

    ``ahead[h]`` is by how much the work that host h has launched so far ends later than the host is done launching it:
    that long the device goes on without it. It stays small, however long the step, so nothing is lost in rounding.

    Args:
        op_s: float64 [n], seconds of kernels; what is waited for is added.
        launch_s: float64 [n], what the host takes for an op.
        stream: int64 [n], the number of its host.
        has_launches: bool [n], whether `op_s` contains the waiting already, as a measured time does.
    """
    ahead = np.zeros(stream.max() + 1 if len(stream) else 0)
    for i in range(len(op_s)):
        # Seconds of work left to the device once this op is launched; below 0, the time that it has been idle.
        left = ahead[stream[i]] - launch_s[i]
        if left < 0.0 and not has_launches[i]:
            # The device has nothing to do until the host is done: the op waits, and then it is alone.
            ahead[stream[i]] = op_s[i]
            op_s[i] -= left
        else:
            # A measured time may end before its launches would: then host and device are at one.
            ahead[stream[i]] = max(left + op_s[i], 0.0)
