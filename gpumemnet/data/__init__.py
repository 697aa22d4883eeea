"""Measurements and the dataset that holds them."""
