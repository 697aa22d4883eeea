"""Published planners of memory, on the costs of :mod:`gpumemnet.planner`, for comparison."""
