"""The objectives by name; a module of its own, so that registries load no numbers."""

from __future__ import annotations

LATENCY, THROUGHPUT = "latency", "throughput"
OBJECTIVES = (LATENCY, THROUGHPUT)
