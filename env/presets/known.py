"""The device of `env.gpus` that a driver's name of a GPU means."""

from __future__ import annotations

import re

from env import gpus
from env.device import Device

_FORM = re.compile(r"SXM\d?|PCIE|NVL|HBM\w*|\d+GB|NVIDIA|AMD|GEFORCE|TESLA|INSTINCT|RTX")


def known_device(name: str) -> Device | None:
    """The device of a preset that a driver's name means, e.g. ``"NVIDIA H100 80GB HBM3"``; None where there is none.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
    """
    words = _words(name)
    best: tuple[int, Device] | None = None
    for device in (each for each in vars(gpus).values() if isinstance(each, Device) and each.kind == "gpu"):
        own = _words(device.model)
        designation = {word for word in own if not _FORM.fullmatch(word)}
        if not designation or not designation <= words or _is_other_form(own, words):
            continue
        shared = len(own & words)
        if best is None or shared > best[0]:
            best = shared, device
    return best[1] if best is not None else None


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word}


def _is_other_form(own: set[str], words: set[str]) -> bool:
    """Whether one is a card for PCIe, or a pair of them, and the other is not, or they have unlike memories."""
    if "PCIE" in words and any(word.startswith("SXM") for word in own):
        return True
    if any(word.startswith("SXM") for word in words) and "PCIE" in own:
        return True
    if ("NVL" in words) != ("NVL" in own):
        return True
    sizes, wanted = ({word for word in some if re.fullmatch(r"\d+GB", word)} for some in (own, words))
    return bool(sizes and wanted and sizes != wanted)
