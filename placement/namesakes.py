"""Other packages of the names of ours: a user's own ``env.py`` would be imported in place of `env`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

OURS = ("graphs", "env", "baselines")


def refuse_namesakes() -> None:
    """A user's own ``env.py`` beside their script comes before our package of that name: say so at once.

    A folder without ``__init__.py``, such as a virtual environment called ``env``, gives way: Python takes it for a
    namespace package, which an editable install of ours would come after.

    Raises:
        ImportError: names the other one and where it is; ``python -m placement`` prints that and ends.
    """
    root = Path(__file__).resolve().parent.parent
    for name in OURS:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is None and name not in sys.modules and (root / name / "__init__.py").is_file():
            _load(name, root / name)
            continue
        if origin is None or Path(origin).resolve() != root / name / "__init__.py":
            found = origin or "another folder"
            sentence = (
                f"placement needs its own package {name!r} from {root}, but Python finds {found} under that name; "
                "rename that one or move it out of Python's path."
            )
            if ["-m", "placement"] in (sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv))):
                print(f"placement: {sentence}", file=sys.stderr)
                sys.exit(2)
            raise ImportError(sentence)


def _load(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # noqa: PT018
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
