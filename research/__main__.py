"""``python -m research``."""

import sys

from research.cli import main

if __name__ == "__main__":
    sys.exit(main())
