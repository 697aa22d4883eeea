"""The training job as a scheduler knows it before it runs, with a reader and a writer for each
format."""
