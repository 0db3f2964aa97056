"""How the experts of an answer take tokens, in words."""

from __future__ import annotations

from graphs.origin import CAPACITY, Origin


def experts_words(origin: Origin) -> str:
    """How experts take tokens, and how many of them each device is taken to have; empty where there are none."""
    if origin.experts is None:
        return ""
    if origin.experts == CAPACITY:
        return "with capacity: every seat is computed, whatever the load"
    if origin.expert_load is None:
        return "dropless, an even load assumed where they are spread (--expert-load says otherwise)"
    return f"dropless, {origin.expert_load:g} times an even load assumed on the fullest device where they are spread"
