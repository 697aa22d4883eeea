"""``python -m dataset_builder``."""

from .cli import main

if __name__ == "__main__":
    main()
