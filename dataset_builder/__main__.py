"""``python -m dataset_builder``."""

from dataset_builder.cli import main

if __name__ == "__main__":
    main()
