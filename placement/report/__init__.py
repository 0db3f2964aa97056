"""Reports of a comparison: one HTML page that opens offline, and a Chrome/Perfetto trace."""

from placement.report.fits import write_fit_sweep, write_fits
from placement.report.html import write_html
from placement.report.trace import write_trace
from placement.solving.result import schedule_of

__all__ = [
    "schedule_of",
    "write_fit_sweep",
    "write_fits",
    "write_html",
    "write_trace",
]
