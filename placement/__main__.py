"""``python -m placement`` is the ``placement`` command."""

from placement.cli import main

main()
