"""Connections among processes of one host alone."""

from __future__ import annotations

import os
import sys

_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def keep_to_loopback() -> None:
    """Let groups of gloo and NCCL that this process makes listen on the loopback interface: they ask nobody who he is.

    ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` name another one.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _INTERFACE)
