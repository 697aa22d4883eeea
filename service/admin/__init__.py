"""What answers now: the champion of a registry, changed without a dropped request, and the challenger beside it."""
