"""Labels jobs by tracing them, where no GPU is at hand."""
