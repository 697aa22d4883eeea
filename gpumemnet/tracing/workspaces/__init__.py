"""Memory that operators take from the caching allocator in addition to their tensors."""
