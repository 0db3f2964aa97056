"""Reports of a comparison: one HTML page that opens offline, and a Chrome/Perfetto trace."""

from placement.report.page import write_html
from placement.report.trace import write_trace
from placement.results.result import schedule_of

__all__ = [
    "schedule_of",
    "write_html",
    "write_trace",
]
