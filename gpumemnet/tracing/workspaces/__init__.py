"""Memory that operators take from the caching allocator beside their tensors."""
