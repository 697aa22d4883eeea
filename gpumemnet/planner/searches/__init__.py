"""Searches for a plan: each takes a chain of units and a limit on its memory, and returns the
option of each unit."""
