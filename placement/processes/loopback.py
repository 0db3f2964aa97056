"""Connections among processes of one host alone."""

from __future__ import annotations

import os
import sys

_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def keep_to_loopback() -> None:
    """Let this process's groups of gloo and NCCL listen on the loopback interface alone: they ask nobody who he is."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _INTERFACE
