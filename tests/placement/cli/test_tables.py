"""Tables for people."""

from __future__ import annotations

import dataclasses

from env.cluster import Cluster
from placement.cli import tables


def test_only_figures_of_data_sheets_are_called_peaks() -> None:
    preset = Cluster.preset("4xV100-pcie")
    assert tables.PEAK in str(tables.cluster_details(preset)[-1])
    measured = dataclasses.replace(preset, source="measured 2026-01-01, placement 1.0: one process")
    assert all(tables.PEAK not in str(part) for part in tables.cluster_details(measured))
