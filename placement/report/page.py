"""The frame of a page: its head, its style, and the files of ``assets/``."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib import resources
from string import Template

_NOTHING_LOADED = "default-src 'none'; style-src 'unsafe-inline'"
_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)


def page(body: str, title: str, parts: dict[str, str], script: str = "") -> str:
    """A whole page that opens offline and asks nothing of any network.

    Args:
        body: file of ``assets/`` with the elements of the body.
        parts: what stands for each ``$name`` in it, as HTML.
        script: what stands for ``$script``. It may run; what comes with the parts may not, should it be a script.
    """
    text, policy = Template(asset(body)), _NOTHING_LOADED
    if script:
        own = _SCRIPT.findall(text.safe_substitute(script=script))
        digests = (b64encode(sha256(each.encode()).digest()).decode() for each in own)
        policy += "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests)
    head = Template(asset("head.html")).substitute(policy=policy, title=escape(title), style=asset("style.css"))
    return f"{head}<body>\n{text.substitute(parts, script=script)}</body>\n</html>\n"


def repeating(command: str, facts: Mapping[str, str], versions: Mapping[str, str], copies: bool = False) -> str:
    """The command that repeats a comparison, what it depends on, and versions, as HTML; empty facts are left out.

    Args:
        copies: with a button for the script of the page.
    """
    known = {**facts, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    items = "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in known.items() if value)
    return f"{typed('repeat with', command, copies)}<dl>{items}</dl>"


def typed(purpose: str, command: str, copies: bool = False) -> str:
    """What is to be typed for a purpose, as HTML; empty without a command.

    Args:
        copies: as of `repeating`.
    """
    code, button = (' id="command"', '<button type="button" id="copy">copy</button>') if copies else ("", "")
    box = f'<div class="replay"><span>{purpose}</span><code{code}>{escape(command)}</code>{button}</div>'
    return box if command else ""


def asset(name: str) -> str:
    """The text of a file of ``assets/``."""
    return resources.files("placement.report").joinpath("assets", name).read_text(encoding="utf-8")
