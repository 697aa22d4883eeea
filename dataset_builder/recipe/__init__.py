"""Recipes: search spaces of training jobs, and the jobs that are drawn from them."""
