"""``python -m gpumemnet``: the command line without its entry point."""

from __future__ import annotations

import sys

from gpumemnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
