"""What training does to memory, every rule once: element types, saved tensors, optimizers, the
closed form."""
