"""The training job: what a scheduler knows of it before it runs, and the one reader and writer of each format."""
