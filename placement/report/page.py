"""The frame of a page: its head, its style, and the files of ``assets/``."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template

_NOTHING_LOADED = "default-src 'none'; style-src 'unsafe-inline'"
_OWN_SCRIPTS = f"{_NOTHING_LOADED}; script-src 'unsafe-inline'"


def page(body: str, title: str, parts: dict[str, str], has_scripts: bool = False) -> str:
    """A whole page that opens offline and asks nothing of any network.

    Args:
        body: file of ``assets/`` with the elements of the body.
        parts: what stands for each ``$name`` in it, as HTML.
        has_scripts: it may run the scripts that are in it.
    """
    head = Template(asset("head.html")).substitute(
        policy=_OWN_SCRIPTS if has_scripts else _NOTHING_LOADED, title=escape(title), style=asset("style.css")
    )
    return f"{head}<body>\n{Template(asset(body)).substitute(parts)}</body>\n</html>\n"


def asset(name: str) -> str:
    """The text of a file of ``assets/``."""
    return resources.files("placement.report").joinpath("assets", name).read_text(encoding="utf-8")
