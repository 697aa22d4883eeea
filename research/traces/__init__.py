"""Labels jobs by tracing them, where no GPU is available."""
